"""Which prompts the demo shows: a few by hash, or all; questions for a model that can be talked to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forerun import workloads
from forerun.cli.options import WORKLOAD_FILE
from forerun.config import BUNDLED_TARGET, SamplingParams
from forerun.errors import ConfigError
from forerun.fields import option
from forerun.workloads import Case

if TYPE_CHECKING:
    from forerun.engine import LLM

QUESTIONS = "questions"
CODE = "code"
NUM_QUESTIONS = 5
NUM_PROMPTS = 4
"""Prompts of a workload without categories."""
CHAT_ROUNDS = 1
"""A round of the usual questions, each answered by every method, takes minutes on two cores."""
TEXT_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Which prompts the demo shows and measures."""

    prompts: str | None = option(
        None,
        f"A bundled workload, {WORKLOAD_FILE}",
        metavar="WORKLOAD",
        default_text="questions for a model with a chat template, else code",
    )
    num_prompts: int | None = option(
        None,
        "How many of them: from the first; where they have categories, one of each in turn, by a hash.",
        low=1,
        default_text=f"{NUM_QUESTIONS} where they have categories, else {NUM_PROMPTS}",
    )
    every: bool = option(
        False, "Measure all of them, show the first alone, and print a table by category too.", flags=("--all",)
    )
    rounds: int | None = option(
        None, "Measured rounds per prompt.", low=1, default_text=f"{CHAT_ROUNDS} for chats, else {TEXT_ROUNDS}"
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is generated.

    Attributes:
        cases: the prompts.
        available: how many the workload holds.
        rounds: measured rounds per prompt.
        sampling: greedy, and how many tokens at most.
        shown: the prompts that are shown before all are measured.
    """

    cases: Sequence[Case]
    available: int
    rounds: int
    sampling: SamplingParams
    shown: Sequence[Case]

    @property
    def chats(self) -> bool:
        """Whether a prompt of it is a chat."""
        return any(case.is_chat for case in self.cases)

    def params(self, llm: LLM, case: Case) -> SamplingParams:
        """For one prompt. Answers end where the model ends them; a raw text goes on, since it might end at once."""
        from forerun.bench.engines import with_prediction

        return with_prediction(replace(self.sampling, ignore_eos=not case.is_chat), llm.drafter, case)


def make_plan(model: str, options: DemoOptions, sampling: SamplingParams) -> Plan:
    """The plan that the options ask for, or the usual one of this model.

    Raises:
        ConfigError: two options contradict each other; there is no such workload, or it cannot be read.
        ModelLoadError: the model's tokenizer, which tells whether it has a chat template, cannot be read.
    """
    if options.every and options.num_prompts is not None:
        raise ConfigError("--all and --num-prompts contradict each other. Leave one of the two out.")
    everything = cases = workloads.load(options.prompts or _usual_workload(model))
    if not options.every and any(case.category for case in cases):
        cases = by_hash(cases)[: options.num_prompts or NUM_QUESTIONS]
    elif not options.every:
        cases = cases[: options.num_prompts or NUM_PROMPTS]
    rounds = options.rounds or (CHAT_ROUNDS if any(case.is_chat for case in cases) else TEXT_ROUNDS)
    sampling = replace(sampling, temperature=0)
    return Plan(cases, len(everything), rounds, sampling, cases[:1] if options.every else cases)


def by_hash(cases: Sequence[Case]) -> list[Case]:
    """In rounds with one of each category, in a round and in a category by the SHA-256 of their names.

    So nobody has chosen which of them come first.
    """
    return workloads.categories_in_turn(sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()))


def last_words(case: Case) -> str:
    """What the user sees as the prompt: the text, or the chat's last message."""
    opening = case.opening
    return opening if isinstance(opening, str) else opening[-1]["content"]


def _usual_workload(model: str) -> str:
    if model == BUNDLED_TARGET:
        return CODE
    from forerun.models import load_tokenizer

    return QUESTIONS if getattr(load_tokenizer(model), "chat_template", None) else CODE
