"""The server's journal: from answers to records without text."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request

from forerun.config import NO_DRAFTER, SamplingParams
from forerun.engine import LLM, StepOutput
from forerun.errors import RequestBodyError
from forerun.kernels.environment import Watch
from forerun.models import number_format
from forerun.server.traffic_records import CATEGORY, AnswerRecord, Recorder, ServerRunRecord

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
        begun = ServerRunRecord(name, number_format(llm.target), Watch.begin().environment())
        self._recorder = Recorder(path, int(size * _MIB), begun)

    def close(self) -> None:
        """Write what is left."""
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
            AnswerRecord(
                category=category,
                drafter=self._chosen(params),
                prompt=prompt,
                tokens=stats.num_tokens,
                forwards=stats.num_forwards,
                drafted=stats.num_draft_tokens,
                accepted=stats.num_accepted_tokens,
                first=min(waited + stats.time_first_token, seconds),
                seconds=seconds,
            )
        )

    def _chosen(self, params: SamplingParams) -> str:
        """The drafter of a request, by name."""
        drafter = self._llm.drafter
        if drafter is None or params.num_draft_tokens == 0 or params.drafter == NO_DRAFTER:
            return NO_DRAFTER
        return (drafter.chosen(params) if drafter.offers else self._llm.drafter_name) or NO_DRAFTER


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
