"""How threads share a loop: a slow one holds up the others by little, and calls that would wait for it take fewer. The
header alone is compiled, into a program."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from forerun.errors import NativeUnavailableError

from .conftest import compiled_program

PROGRAM = r"""
#include "parallel.h"
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
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

// A loop whose first unit is held for 50 ms after all else is done. Prints the wait that counts.
void hold(void* data) {
    Held& c = *(Held*)data;
    Member member(c.team);
    for (const auto [first, last] : member.parts(c.units)) {
        c.others += first ? last - first : 0;
        if (first) continue;
        while (c.others < c.units - last) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

// Calls in imagined time, of `ms` with all threads: prints when each begins, and how many threads it takes. Until `end`
// one of them is late by a time slice of 4 ms.
void pace_calls(int threads, double ms, double end, double whole) {
    Pace pace;
    Clock::time_point now{};
    for (double time = 0; time < whole;) {
        const int taken = pace.threads(threads, now);
        const double late = taken == threads && time < end ? 4 : 0, span = ms * threads / taken + late;
        printf("%g %d ", time, taken);
        time += span;
        now += std::chrono::nanoseconds((int64_t)(1e6 * span));
        if (taken > 1) pace.judge(span / 1e3, late / 1e3, now);
    }
}

// Small calls, of random numbers of threads, by several callers at once. Prints the units that were done.
struct Counted {
    Team team;
    std::atomic<int64_t> units{0};
};
void count(void* data) {
    Counted& c = *(Counted*)data;
    Member member(c.team);
    for (int loop = 1; loop < 4; loop++)
        for ([[maybe_unused]] const int64_t unit : member.each(7 * loop)) c.units++;
}
void call_often(int callers, int64_t calls) {
    std::vector<std::thread> all;
    std::atomic<int64_t> units{0};
    for (int caller = 0; caller < callers; caller++)
        all.emplace_back([&units, calls, caller] {
            unsigned random = caller;
            for (int64_t call = 0; call < calls; call++) {
                random = random * 1103515245 + 12345;
                Counted counted{Team(1 + (random >> 16) % 5)};
                run_in_parallel(count, &counted, counted.team);
                units += counted.units;
                if (random % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random >> 16 & 255));
            }
        });
    for (std::thread& caller : all) caller.join();
    printf("%lld\n", (long long)units);
}

// Prints the threads of calls: of one whose second thread comes back late, of the next, and of one after a pause.
struct Late {
    Team team;
    std::thread::id caller;
};
void come_late(void* data) {
    Late& c = *(Late*)data;
    if (std::this_thread::get_id() != c.caller) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}
void call_late() {
    for (int call = 0; call < 3; call++) {
        Late late{Team(2), std::this_thread::get_id()};
        printf("%d\n", late.team.threads);
        if (call == 0) run_in_parallel(come_late, &late, late.team);
        if (call == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

int main(int, char** arguments) {
    const std::string what = arguments[1];
    const int threads = atoi(arguments[2]);
    if (what == "imagined") {
        imagine(threads, atoll(arguments[3]), atof(arguments[4]));
    } else if (what == "pace") {
        pace_calls(threads, atof(arguments[3]), atof(arguments[4]), atof(arguments[5]));
    } else if (what == "often") {
        call_often(threads, atoll(arguments[3]));
    } else if (what == "late") {
        call_late();
    } else {
        Held held{Team(threads), atoll(arguments[3])};
        run_in_parallel(what == "held" ? body : hold, &held, held.team);
        if (what == "waited") printf("%g\n", held.team.waited.load());
    }
    fflush(stdout);
    _Exit(0);  // threads of the pool wait for ever
}
"""


def compiled(folder: Path, *flags: str) -> Path:
    return compiled_program(folder, PROGRAM, "-pthread", *flags)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("parallel"))


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


@pytest.mark.parametrize(
    ("threads", "units", "counts"), [(2, 1, False), (2, 3, False), (2, 4, True), (16, 24, False), (16, 36, True)]
)
def test_no_wait_counts_in_a_loop_of_few_units(program: Path, threads: int, units: int, *, counts: bool) -> None:
    (waited,) = run(program, "waited", threads, units)
    assert waited > 0.01 if counts else waited == 0


def paced(program: Path, threads: int, ms: float, late_until: float, end: float) -> list[tuple[float, int]]:
    numbers = run(program, "pace", threads, ms, late_until, end)
    return [(start, int(taken)) for start, taken in zip(numbers[::2], numbers[1::2], strict=True)]


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_beside_a_program_that_stays_few_calls_wait(program: Path, threads: int) -> None:
    calls = paced(program, threads, 2, 10_000, 10_000)
    assert {taken for _, taken in calls} == {threads, threads - 1}
    late = [start for start, taken in calls if taken == threads]
    pauses = [later - start for start, later in pairwise(late)]
    assert len(late) < 60 and 256 <= max(pauses) < 272
    assert min(pauses[8:]) >= 256


def test_all_threads_compute_again_when_the_program_is_gone(program: Path) -> None:
    calls = paced(program, 2, 2, 1_000, 3_000)
    assert all(taken == 2 for start, taken in calls if start > 1_000 + 256 + 4)
    again = paced(program, 2, 2, 0, 100)
    assert all(taken == 2 for _, taken in again)


def test_calls_that_are_long_beside_their_waits_take_all_threads(program: Path) -> None:
    assert {taken for _, taken in paced(program, 2, 9, 1_000, 1_000)} == {2}


def test_a_call_after_a_late_thread_takes_one_less_until_a_pause_is_over(program: Path) -> None:
    found = [run(program, "late", 2) for _ in range(5)]
    assert [2, 1, 2] in found  # others see the pause pass between two calls, where the system is busy
    assert {tuple(each) for each in found} <= {(2, 1, 2), (2, 2, 2)}


@pytest.mark.parametrize("callers", [1, 3])
def test_small_calls_of_several_callers_all_end(program: Path, callers: int) -> None:
    assert run(program, "often", callers, 3000) == [callers * 3000 * 7 * (1 + 2 + 3)]


def test_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    try:
        program = compiled(tmp_path, "-fsanitize=thread", "-g")
        run(program, "pace", 2, 1, 0, 1)
    except (NativeUnavailableError, subprocess.CalledProcessError) as failure:
        pytest.skip(f"there is no ThreadSanitizer here: {failure}")
    assert run(program, "often", 3, 300) == [3 * 300 * 7 * (1 + 2 + 3)]
    run(program, "held", 3, 36)
