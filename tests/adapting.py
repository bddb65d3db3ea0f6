"""What a drafter that learns while it serves gains, costs and survives, measured on a machine that is left alone.

    python tests/adapting.py drift MODEL --drafter eagle:model=FOLDER --prompts FILE --minutes 60
    python tests/adapting.py slowdown MODEL --drafter eagle:model=FOLDER --prompts FILE --minutes 20
    python tests/adapting.py recording MODEL --drafter eagle:model=FOLDER --prompts FILE --minutes 1
    python tests/adapting.py soak MODEL --drafter eagle:model=FOLDER --prompts FILE --minutes 60

FILE is JSONL with a prompt, messages or turns on each line; `drift` takes its categories one after another, three at
most, and wants at least +0.15 tokens a forward after 20,000 served tokens; a prompt that comes again (`repeated`) may
be known by heart. `slowdown` wants at most 2 %, of wall time, `recording` of CPU time, in which nothing is learnt.
`soak` kills the server now and then, and wants the same text, and memory that stays level. Each prints JSON, one line a
finding, and ends with exit code 1 where its goal is not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from forerun import LLM, SamplingParams
from forerun.config import AdaptOptions
from forerun.utils.workloads import Case, load_workload

SERVED_TOKENS = 20_000
LEAST_GAIN = 0.15
MOST_SLOWER = 0.02
LAST = 12
"""Requests of a kind, the last ones, by which the gain is judged."""
PORT = 8765


def tell(**finding: Any) -> None:
    """Print a finding as a line of JSON."""
    print(json.dumps(finding), flush=True)


def opened(options: argparse.Namespace, *, adapt: bool) -> LLM:
    """Load the model, with a drafter that learns or not."""
    learning = AdaptOptions(adapt=adapt, adapt_share=options.share)
    return LLM(options.model, options.drafter, num_draft_tokens=options.k, adapt=learning)


def answer(llm: LLM, case: Case, max_tokens: int = 256) -> Any:
    """Answer one case greedily."""
    ask: Any = llm.generate if isinstance(case.opening, str) else llm.chat
    return ask(case.opening, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)


def rate(answers: Sequence[Any]) -> float:
    """Return the tokens a forward of some answers."""
    return sum(each.stats.num_tokens for each in answers) / max(1, sum(each.stats.num_forwards for each in answers))


def kinds_of(options: argparse.Namespace) -> dict[str, list[Case]]:
    """Return the cases of the first three categories, or of three parts of a file without any."""
    cases = load_workload(options.prompts)
    kinds: dict[str, list[Case]] = {}
    for number, case in enumerate(cases):
        kinds.setdefault(case.category or f"part {3 * number // len(cases) + 1}", []).append(case)
    return dict(list(kinds.items())[:3])


def drift(options: argparse.Namespace) -> bool:
    """Serve three kinds of prompts one after another; judge by the last requests of each, which the drafter as it was
    loaded answers, too."""
    kinds = kinds_of(options)
    end = time.monotonic() + 60 * options.minutes
    served, gains = 0, []
    asked: Counter[str] = Counter()
    with opened(options, adapt=True) as llm:
        last: dict[str, list[tuple[Case, Any]]] = {}
        for number, (kind, cases) in enumerate(kinds.items(), 1):
            last[kind] = []
            own_end = time.monotonic() + (end - time.monotonic()) / (len(kinds) - number + 1)
            for case in cycle(cases):
                found = answer(llm, case)
                served += found.stats.num_tokens
                asked[case.opening if isinstance(case.opening, str) else str(case.opening)] += 1
                last[kind] = [*last[kind], (case, found)][-LAST:]
                time.sleep(options.gap)
                if served >= SERVED_TOKENS * number / len(kinds) or time.monotonic() > own_end:
                    break
            assert llm.adapting is not None
            tell(kind=kind, served=served, repeated=asked.total() - len(asked), learning=llm.adapting.total())
    with opened(options, adapt=False) as plain:
        for kind, pairs in last.items():
            before = [answer(plain, case) for case, _ in pairs]
            after = [found for _, found in pairs]
            gains.append(rate(after) - rate(before))
            is_same = [each.text for each in before] == [each.text for each in after]
            tell(kind=kind, before=round(rate(before), 3), after=round(rate(after), 3), text_is_same=is_same)
    gain = statistics.mean(gains)
    tell(goal=f"+{LEAST_GAIN} tokens a forward after {SERVED_TOKENS:,} tokens", served=served, gain=round(gain, 3))
    return gain >= LEAST_GAIN


def slowdown(options: argparse.Namespace) -> bool:
    """Answer the same prompts by turns with a drafter that learns and with one that does not, whose requests the
    other's learning leaves alone."""
    cases = load_workload(options.prompts)
    end = time.monotonic() + 60 * options.minutes
    ratios = []
    with opened(options, adapt=True) as llm, opened(options, adapt=False) as plain:
        adapting: Any = llm.adapting
        adapting._round_tokens = 64  # it wants to learn all the time
        is_busy = adapting._is_busy
        adapting._adaptable.swap = lambda *_: None  # both draft the same
        for case in cycle(cases):
            adapting._is_busy = lambda: True
            time.sleep(0.2)
            start = time.perf_counter()
            answer(plain, case)
            without = time.perf_counter() - start
            adapting._is_busy = is_busy
            time.sleep(options.gap)
            start = time.perf_counter()
            answer(llm, case)
            ratios.append((time.perf_counter() - start) / without)
            if time.monotonic() > end:
                break
        tell(learning=adapting.total())
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(1000))
    median = statistics.median(ratios)
    tell(
        goal=f"at most {MOST_SLOWER:.0%} slower",
        pairs=len(ratios),
        ratio=round(median, 4),
        interval=[medians[25], medians[974]],
    )
    return median <= 1 + MOST_SLOWER


def recording(options: argparse.Namespace) -> bool:
    """Measure the CPU time of keeping what was verified, within that of the whole."""
    end = time.monotonic() + 60 * options.minutes
    spent, tokens = 0.0, 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent
            start = time.thread_time()
            result = function(*args)
            spent += time.thread_time() - start
            return result

        return call

    with opened(options, adapt=True) as llm:
        adapting: Any = llm.adapting
        adapting._is_busy = lambda: True  # nothing is learnt
        drafter = adapting._adaptable._drafter
        for holder, name in ((adapting.rings, "see"), (adapting.rings, "leave"), (drafter, "_own_part")):
            setattr(holder, name, timed(getattr(holder, name)))
        start = time.process_time()
        for case in cycle(load_workload(options.prompts)):
            tokens += answer(llm, case).stats.num_tokens
            if time.monotonic() > end:
                break
        whole = time.process_time() - start
    tell(
        goal=f"at most {MOST_SLOWER:.0%} of the CPU time",
        tokens=tokens,
        microseconds_a_token=round(1e6 * spent / tokens, 1),
        whole_microseconds_a_token=round(1e6 * whole / tokens),
        share=round(spent / whole, 4),
    )
    return spent <= MOST_SLOWER * whole


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """Return what the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    with urlopen(request, timeout=600) as found:
        return json.loads(found.read())


def asked_of(case: Case) -> str:
    """Return the server's greedy answer to one case."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 128}
    if isinstance(case.opening, str):
        text: str = ask("/v1/completions", body | {"prompt": case.opening})["choices"][0]["text"]
    else:
        text = ask("/v1/chat/completions", body | {"messages": case.opening})["choices"][0]["message"]["content"]
    return text


def started(options: argparse.Namespace, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start servers, one after the end of another."""
    command = [sys.executable, "-m", "forerun", "serve", options.model, "--drafter", options.drafter, "--adapt"]
    command += ["--adapt-folder", folder, "--port", str(PORT)]
    while True:
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while server.poll() is None:
            try:
                ask("/health")
                break
            except (URLError, OSError):
                time.sleep(0.5)
        yield server


def soak(options: argparse.Namespace) -> bool:
    """Serve, kill the server at random every few minutes, and look that texts are those of plain decoding, that what
    was learnt comes back, and that memory stays level."""
    cases = load_workload(options.prompts)
    draws = random.Random(0)
    end = time.monotonic() + 60 * options.minutes
    known: dict[str, tuple[Case, str]] = {}
    memory, wrong, lost, kills = [], 0, 0, 0
    with TemporaryDirectory() as folder:
        servers = started(options, folder)
        while time.monotonic() < end:
            server = next(servers)
            before = ask("/v1/adaptation")
            if kills and not before["is_adapted"] and (Path(folder) / "all" / "copy").exists():
                lost += 1
            kill_at = time.monotonic() + draws.uniform(60, 300)
            while time.monotonic() < min(end, kill_at):
                case = draws.choice(cases)
                text = asked_of(case)
                wrong += known.setdefault(str(case.opening), (case, text))[1] != text
                time.sleep(draws.uniform(0, 2 * options.gap))
            pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
            memory.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)
            tell(kills=kills, mebibytes=memory[-1], wrong=wrong, lost=lost, learning=ask("/v1/adaptation"))
            server.send_signal(signal.SIGKILL)
            server.wait()
            kills += 1
        servers.close()  # type: ignore[attr-defined]
    with LLM(options.model, None) as plain:
        for case, text in list(known.values())[:50]:
            wrong += answer(plain, case, 128).text != text
    half = len(memory) // 2
    is_level = half == 0 or max(memory[half:]) <= 1.1 * max(memory[:half])
    tell(goal="nothing lost, no other text, memory level", kills=kills, wrong=wrong, lost=lost, memory=memory)
    return not wrong and not lost and is_level


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {"drift": drift, "slowdown": slowdown, "recording": recording, "soak": soak}
    parser.add_argument("measure", choices=measures)
    parser.add_argument("model")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", default="questions")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between requests, in which it may learn")
    parser.add_argument("--k", type=int, default=4)
    options = parser.parse_args()
    return 0 if measures[options.measure](options) else 1


if __name__ == "__main__":
    sys.exit(main())
