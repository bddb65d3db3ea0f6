"""Many sequences at once, prompts and answers of one length, beside a plain PyTorch loop of as many slots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forerun.bench.load.asks import Ask
from forerun.bench.load.serving import Clients
from forerun.bench.measure import Interval, bootstrap, interleave, ratio
from forerun.bench.report import Columns
from forerun.bench.slots_reference import SlotsReference
from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.models import LanguageModel, Rows

REFERENCE = "plain PyTorch loop"
CHECKED = 4
"""Prompts on which the loop's logits are compared with the model's."""


@dataclass(frozen=True, slots=True)
class ManyRow:
    """One method; medians and intervals over the rounds.

    Attributes:
        method: its name, with the loop's number of threads.
        speed: tokens of the answers per second, prompts included.
        over_loop: its ratio to the loop's on one thread in the same round.
    """

    method: str
    speed: Interval
    over_loop: Interval


COLUMNS: Columns[ManyRow] = {
    "method": lambda row: row.method,
    "tokens/s": lambda row: f"{row.speed:.1f}",
    "over the loop on one thread": lambda row: f"{row.over_loop:.2f}",
}


@dataclass(frozen=True, slots=True)
class Check:
    """How far the loop's logits after a prompt are from the model's.

    Attributes:
        difference: mean absolute difference over the standard deviation of the model's logits, median of the prompts.
        same_token: share of the prompts after which both have the same most probable token.
    """

    difference: float
    same_token: float


def measure(
    engines: Mapping[str, LLM],
    reference: SlotsReference,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[ManyRow]:
    """A row per engine and number of threads of the loop, interleaved. The loop runs on one thread, and on all.

    prompts: one for each slot of the reference, all of one length.
    """
    say(f"{len(prompts)} sequences at once")
    threads = torch.get_num_threads()
    methods: dict[str, Callable[[], int]] = {}
    for count in sorted({1, threads}):
        methods[_loop_name(count)] = lambda count=count: _loop(reference, prompts, max_tokens, count)  # type: ignore[misc]
    for name, llm in engines.items():
        methods[name] = lambda llm=llm: _serve(llm, prompts, max_tokens)  # type: ignore[misc]
    speeds = {name: [run.value / run.seconds for run in runs] for name, runs in interleave(methods, rounds).items()}
    return [ManyRow(name, bootstrap(each), ratio(each, speeds[_loop_name(1)])) for name, each in speeds.items()]


def check(reference: SlotsReference, model: LanguageModel, prompts: Sequence[Sequence[int]]) -> Check:
    """Compare the logits after the first CHECKED prompts."""
    part = prompts[:CHECKED]
    theirs = reference.forward(torch.tensor(part), 0)
    differences, same = [], 0
    for row, prompt in zip(theirs, part, strict=True):
        cache = model.new_cache()
        with torch.inference_mode():
            ours = model.forward([Rows(cache, list(prompt), num_logits=1)]).logits[-1].float()
        cache.free()
        differences.append(float((row - ours).abs().mean() / ours.std()))
        same += int(row.argmax()) == int(ours.argmax())
    return Check(statistics.median(differences), same / len(part))


def _loop_name(threads: int) -> str:
    return f"{REFERENCE}, threads: {threads}"


def _loop(reference: SlotsReference, prompts: Sequence[Sequence[int]], max_tokens: int, threads: int) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return sum(map(len, reference.generate(prompts, max_tokens)))
    finally:
        torch.set_num_threads(before)


def _serve(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    clients = Clients(llm.engine, SamplingParams(temperature=0, ignore_eos=True), "many", streamed=False)
    for prompt in prompts:
        clients.send(Ask(list(prompt), max_tokens))
    clients.finish()
    return clients.num_tokens
