"""A journal of a server that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forerun.server.traffic_records import AnswerRecord, Recorder, ServerRunRecord
from measured import QUIET

ANSWERS = [
    AnswerRecord(category, drafter, 20 + number, 101, forwards, drafted, accepted, 0.1, 0.1 + 0.02 * forwards)
    for number in range(6)
    for category, drafter, forwards, drafted, accepted in (
        ("code", "suffix", 25, 100, 76),
        ("prose", "suffix", 50, 120, 51),
        ("code", "none", 101, 0, 0),
    )
]


def begun(model: str = "bundled") -> ServerRunRecord:
    """What the server served."""
    return ServerRunRecord(model, "bfloat16", replace(QUIET, load_before=(), load_after=()))


def written(path: Path, answers: Sequence[AnswerRecord] = ANSWERS, model: str = "bundled") -> Path:
    """A journal of it."""
    recorder = Recorder(path, 1 << 20, begun(model))
    for each in answers:
        recorder.answer(each)
    recorder.close()
    return path
