"""The journal of a server: records of its answers, without text."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request

from forerun.config import NO_DRAFTER, SamplingParams
from forerun.engine import LLM, StepOutput
from forerun.errors import RequestBodyError
from forerun.kernels.provenance import Watch
from forerun.models import number_format
from forerun.server.traffic_records import CATEGORY, AnswerRecord, Recorder, ServerRunRecord

HEADER = "x-forerun-category"
_MIB = 1 << 20


class ServerJournal(Recorder):
    """Records the answers of a server.

    Args:
        name: the model's name in requests.
        path: of the journal.
        size: maximum MiB of it.

    Raises:
        ConfigError: it cannot be written there.
    """

    def __init__(self, llm: LLM, name: str, path: Path, size: float) -> None:
        self._llm = llm
        environment = Watch.begin().environment()
        super().__init__(path, int(size * _MIB), ServerRunRecord(name, number_format(llm.target), environment))

    def answered(self, output: StepOutput, params: SamplingParams, prompt: int, category: str, seconds: float) -> None:
        """Record a complete choice.

        Args:
            prompt: number of prompt tokens.
            seconds: since its request was admitted.
        """
        assert output.choice is not None
        stats = output.choice.stats
        waited = max(seconds - stats.time_total, 0.0)
        self.answer(
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
        """Return the name of a request's drafter."""
        drafter = self._llm.drafter
        if drafter is None or params.num_draft_tokens == 0 or params.drafter == NO_DRAFTER:
            return NO_DRAFTER
        return (drafter.chosen(params) if drafter.offers else self._llm.drafter_name) or NO_DRAFTER


def category_of(request: Request) -> str:
    """Return the category that the client gave; empty without one.

    Raises:
        RequestBodyError: it is not a word.
    """
    given = request.headers.get(HEADER, "")
    if given and CATEGORY.fullmatch(given) is None:
        raise RequestBodyError(
            f"The header {HEADER} must be a word of up to 40 letters, digits, dots, dashes and underscores, such as "
            "code. Correct it, or leave it out."
        )
    return given
