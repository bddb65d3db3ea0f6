"""The server's journal: from answers and steps to records without text."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request

from forerun.config import NO_DRAFTER, SamplingParams
from forerun.engine import LLM, StepOutput
from forerun.engine.stats import StepStats
from forerun.errors import RequestBodyError
from forerun.models import number_format
from forerun.results.machine import machine
from forerun.traffic.recorder import Recorder
from forerun.traffic.records import CATEGORY, Answer, Steps

HEADER = "x-forerun-category"
_MIB = 1 << 20


class ServerJournal:
    """Records what a server answers.

    Args:
        name: of the model, as requests call it.
        path: of the journal.
        size: MiB of it at most.

    Raises:
        ConfigError: it cannot be written there.
    """

    def __init__(self, llm: LLM, name: str, path: Path, size: float) -> None:
        self._llm = llm
        self._recorder = Recorder(path, int(size * _MIB))
        self._recorder.begin(
            {
                "model": name,
                "number_format": number_format(llm.target),
                "exact": llm.exact,
                "drafter": self._chosen(SamplingParams()),
                "num_draft_tokens": str(llm.engine.config.num_draft_tokens),
                "max_batch": llm.engine.config.max_batch,
                "machine": machine(),
            }
        )
        llm.engine.watch = self._step

    def close(self) -> None:
        """Write what is left."""
        self._llm.engine.watch = None
        self._recorder.close()

    def answered(self, output: StepOutput, params: SamplingParams, prompt: int, category: str, seconds: float) -> None:
        """A choice is complete.

        Args:
            prompt: its tokens.
            seconds: since its request was let in.
        """
        assert output.choice is not None
        stats = output.choice.stats
        waited = max(seconds - stats.time_total, 0.0)
        self._recorder.answer(
            Answer(
                at=max(self._recorder.now() - seconds, 0.0),
                category=category,
                prompt=prompt,
                cached=stats.num_cached_tokens,
                tokens=stats.num_tokens,
                end=output.choice.finish_reason or "error",
                greedy=params.temperature == 0,
                drafter=self._chosen(params),
                forwards=stats.num_forwards,
                plain_forwards=stats.num_plain_forwards,
                asked=stats.num_asked_tokens,
                drafted=stats.num_draft_tokens,
                accepted=stats.num_accepted_tokens,
                reached=stats.reached_per_position,
                accepted_at=stats.accepted_per_position,
                decisions=stats.decisions,
                waited=waited,
                first=min(waited + stats.time_first_token, seconds),
                seconds=seconds,
                draft=stats.time_draft,
                target=stats.time_target,
                verify=stats.time_verify,
            )
        )

    def _chosen(self, params: SamplingParams) -> str:
        """The drafter of a request, by name."""
        drafter = self._llm.drafter
        if drafter is None or params.num_draft_tokens == 0 or params.drafter == NO_DRAFTER:
            return NO_DRAFTER
        return (drafter.chosen(params) if drafter.offers else self._llm.drafter_name) or NO_DRAFTER

    def _step(self, stats: StepStats) -> None:
        if not stats.num_sequences:
            return
        decoding = stats.num_rows - stats.num_prompt_rows - stats.num_draft_tokens
        self._recorder.steps(
            Steps(
                decoding=max(decoding, 0),
                drafted=stats.num_draft_tokens,
                prompt=stats.num_prompt_rows,
                count=1,
                draft_rows=stats.num_draft_tokens,
                prompt_rows=stats.num_prompt_rows,
                accepted=stats.num_accepted_tokens,
                tokens=stats.num_tokens,
                positions=stats.num_positions,
                draft=stats.time_draft,
                target=stats.time_target,
                verify=stats.time_verify,
                total=stats.time_total,
                squares=stats.time_total**2,
            )
        )


def category_of(request: Request) -> str:
    """The client's word for what it asks; empty without one.

    Raises:
        RequestBodyError: it is no word.
    """
    given = request.headers.get(HEADER, "")
    if given and CATEGORY.fullmatch(given) is None:
        raise RequestBodyError(
            f"The header {HEADER} must be a word of up to 40 letters, digits, dots, dashes and underscores, such as "
            "code. Correct it, or leave it out."
        )
    return given
