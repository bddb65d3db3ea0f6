"""How threads share a loop: a slow one holds up the others by little. The header alone is compiled, into a program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forerun.kernels.cpu.compiler import SOURCES, find_compiler

PROGRAM = r"""
#include "parallel.h"
#include <cstdio>
#include <cstdlib>
#include <deque>
using namespace forerun;

// A loop in imagined time: a unit takes 1, of the first thread `slowness`. Prints when it ends, and what the first did.
void imagine(int threads, int64_t units, double slowness) {
    Team team(threads);
    std::deque<Member> members;
    std::vector<double> clock(threads);
    for (int i = 0; i < threads; i++) members.emplace_back(team).open(units);
    int64_t done = 0, slow = 0;
    for (double end = 0; done < units;) {
        int next = 0;
        for (int i = 1; i < threads; i++) next = clock[i] < clock[next] ? i : next;
        const Part part = members[next].claim();
        const int64_t count = part.last - part.first;
        clock[next] += count * (next ? 1 : slowness);
        done += count;
        slow += next ? 0 : count;
        end = clock[next] > end ? clock[next] : end;
        if (done == units) printf("%g %lld\n", end, (long long)slow);
    }
}

// Loops of threads, of which the first to claim waits until the others have done all else. Prints what it has claimed.
struct Held {
    Team team;
    int64_t units;
    std::atomic<int64_t> others{0};
};
void body(void* data) {
    Held& c = *(Held*)data;
    Member member(c.team);
    for (const auto [first, last] : member.parts(c.units)) {
        if (first) {
            c.others += last - first;
            continue;
        }
        while (c.others < c.units - last) std::this_thread::yield();
        printf("%lld\n", (long long)last);
    }
}

int main(int, char** arguments) {
    const int threads = atoi(arguments[2]);
    const int64_t units = atoll(arguments[3]);
    if (arguments[1][0] == 'i') {
        imagine(threads, units, atof(arguments[4]));
    } else {
        Held held{Team(threads), units};
        run_in_parallel(body, &held, threads);
    }
    fflush(stdout);
    _Exit(0);  // threads of the pool wait for ever
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path_factory.mktemp("parallel") / "program.cpp"
    source.write_text(PROGRAM)
    made = source.with_suffix("")
    compiler.call([["-std=c++17", "-pthread", f"-I{SOURCES}", "-o", str(made), str(source)]], 120)
    return made


def run(program: Path, *arguments: object) -> list[float]:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=60)
    return [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize("units", [1, 7, 36, 100, 608, 9496])
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8, 16])
def test_a_slow_thread_holds_up_the_others_by_a_unit_of_its_own(program: Path, threads: int, units: int) -> None:
    for slowness in (1, 2, 4):
        end, slow = run(program, "imagined", threads, units, slowness)
        ideal = units / (threads - 1 + 1 / slowness)
        assert ideal - 1e-3 * units <= end <= ideal + slowness + 1, slowness
        assert slow >= 1


@pytest.mark.parametrize(("threads", "units"), [(2, 1), (2, 36), (3, 100), (8, 500), (16, 36), (16, 2000)])
def test_others_do_all_that_a_suspended_thread_has_not_claimed(program: Path, threads: int, units: int) -> None:
    (claimed,) = run(program, "held", threads, units)
    assert claimed <= max(1, units / (4 * threads))
