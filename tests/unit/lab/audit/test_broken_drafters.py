"""An audit of a drafter that fails says what went wrong, and where."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq

from doubles import Scripted
from forerun.lab.audit.bits_layer import bits_layer
from forerun.lab.audit.certificate import Layer
from forerun.lab.audit.engine_layer import engine_layer
from forerun.lab.audit.settings import SAMPLED, AuditOptions
from forerun.types import Draft, Sequence

from .conftest import PROMPTS, make_world


def layers(drafter: Scripted) -> list[Layer]:
    audited = make_world(drafter).audited
    bits = bits_layer(audited, PROMPTS[:1], AuditOptions(max_tokens=8))
    return [bits, engine_layer(audited, PROMPTS, 60, 0, 1e-5, grid=SAMPLED[:2])]


class Broken(Scripted):
    def draft(self, sequences: Seq[Sequence], *_: object) -> list[Draft]:  # type: ignore[override]
        return [self.look_up(sequence) for sequence in sequences]

    def look_up(self, sequence: Sequence) -> Draft:
        return {1: Draft.empty()}[sequence.num_output]


def test_an_error_is_shown_once_with_its_place() -> None:
    for layer in layers(Broken(lambda *_: [])):
        assert layer.verdict == "fail"
        (note,) = layer.notes
        line = Broken.look_up.__code__.co_firstlineno + 1
        assert re.fullmatch(
            rf"The first error: KeyError \d \(test_broken_drafters.py, line {line}, in look_up\)\.", note
        )
        assert len(layer.findings) <= 2 * len(layer.tests)
        assert any("requests ended with KeyError" in finding for finding in layer.findings)


def test_a_draft_that_is_refused_is_shown_with_the_reason() -> None:
    for layer in layers(Scripted(lambda _, k: Draft.chain([1] * (k + 1)))):
        (note,) = layer.notes
        assert re.fullmatch(
            r"The first error: The drafter Scripted gave \d tokens, but at most \d were requested\.", note
        )
