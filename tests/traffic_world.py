"""Traffic of a server that does not exist: answers and steps by a law of costs that a test knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.bench.journal.prices import Work
from forerun.bench.journal.queue import Replayed, Request, replay
from forerun.traffic.recorder import Recorder
from forerun.traffic.records import Answer, Steps

Law = Callable[[Work], float]
LENGTHS = {"code": 3.2, "prose": 1.4}
K = 4


def law(work: Work) -> float:
    """Seconds of a step: memory, rows, positions, and a drafter that costs a millisecond a token."""
    return 0.020 + 0.0004 * work.rows + 1e-6 * work.positions + (0.001 * work.draft_rows if work.drafts else 0.0)


@dataclass(frozen=True, slots=True)
class Made:
    """A journal's content, and what truly happens without speculation."""

    answers: Sequence[Answer]
    steps: Sequence[Steps]
    plain: Replayed


def requests(count: int, *, gap: float, seed: int = 0) -> list[Request]:
    """Of two categories, at random moments."""
    rng, at, made = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(1 / gap)
        category = ("code", "prose")[number % 2]
        prompt, tokens = rng.randint(20, 400), rng.randint(10, 120)
        made.append(Request(at, prompt, prompt, tokens, LENGTHS[category], K, category))
    return made


def made(count: int = 80, *, gap: float = 0.8, max_batch: int = 4, price: Law = law) -> Made:
    """Served with drafts of K tokens; every tenth step has none, as where K is being learned."""
    steps: dict[tuple[int, int, int], Steps] = {}
    asked = 0

    def priced(work: Work) -> float:
        nonlocal asked
        asked += 1
        rows = 0 if asked % 10 == 0 else work.draft_rows
        seen = Work(work.decoding, rows, work.prompt_rows, work.positions)
        total, draft = price(seen), 0.001 * rows
        each = Steps(
            *(seen.decoding, int(rows), int(seen.prompt_rows), 1, int(rows), int(seen.prompt_rows), 0, 0),
            *(int(seen.positions), draft, total - draft - 0.002, 0.001, total, total**2),
        )
        steps.setdefault(each.key, Steps(*each.key)).add(each)
        return total

    ours = requests(count, gap=gap)
    served = replay(ours, priced, max_batch, lambda _: 64.0, together=1)
    bare = [Request(each.at, each.prompt, each.context, each.tokens, 1.0, 0.0, each.category) for each in ours]

    def unpriced(work: Work) -> float:
        return price(Work(work.decoding, 0, work.prompt_rows, work.positions, drafts=False))

    plain = replay(bare, unpriced, max_batch, lambda _: 64.0, together=1)
    return Made([answer(each.request, each.first, each.seconds) for each in served.served], list(steps.values()), plain)


def answer(request: Request, first: float, seconds: float) -> Answer:
    """The record of an answer."""
    forwards = 1 + -(-(request.tokens - 1) // request.per_step)
    drafted = int(0.9 * request.drafted * (forwards - 1))
    accepted = max(request.tokens - int(forwards), 0)
    spread = [int(accepted * share) for share in (0.4, 0.3, 0.2, 0.1)]
    return Answer(
        *(request.at, request.category, request.prompt, 0, request.tokens, "stop", True, "suffix", int(forwards)),
        *(1, drafted, drafted, accepted, [int(forwards) - 1] * K, spread, {"on: gain": int(forwards) - 1}),
        *(0.0, first, seconds, 0.0, 0.0, 0.0),
    )


def begun(**changes: object) -> Mapping[str, object]:
    """Facts of a server."""
    machine = {"cpu": "Some Processor", "cores": 2, "threads": 2, "kernels": "native avx512"}
    return {
        "model": "bundled",
        "number_format": "bfloat16",
        "exact": True,
        "drafter": "suffix",
        "num_draft_tokens": "auto",
        "max_batch": 4,
        "machine": machine,
        **changes,
    }


def written(path: Path, content: Made, bound: int = 1 << 20, **changes: object) -> Path:
    """A journal of it."""
    recorder = Recorder(path, bound)
    recorder.begin(begun(**changes))
    for each in content.answers:
        recorder.answer(each)
    for steps in content.steps:
        recorder.steps(replace(steps))
    recorder.close()
    return path
