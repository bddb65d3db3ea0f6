from __future__ import annotations

import pytest
import torch

from forerun.train.copying import SHOWN_LINES, SPAN_LINES, copying, spans
from forerun.train.corpus import SourceFile
from forerun.train.tokenizer import train_tokenizer

FILES = [SourceFile("a.py", "".join(f"line_{n} = call({n})\n" for n in range(2 * SPAN_LINES))), SourceFile("b.py", "x")]


class Reciter:
    """A model that goes on as the same text did one span earlier, and errs from token `errs_from` of it on."""

    device = torch.device("cpu")

    def __init__(self, period: int, errs_from: int) -> None:
        self.period, self.errs_from = period, errs_from

    def parameters(self):
        return iter([torch.zeros(1)])

    config = type("Config", (), {"_attn_implementation": "forerun_short_window"})()

    def set_attn_implementation(self, name: str) -> None:
        pass

    def __call__(self, input_ids, use_cache):
        row = input_ids[0].tolist()
        guesses = [row[max(0, at + 1 - self.period)] for at in range(len(row))]
        for at in range(self.period + self.errs_from, len(guesses)):
            guesses[at] = 0
        logits = torch.nn.functional.one_hot(torch.tensor([guesses]), 400).float()
        return type("Output", (), {"logits": logits})()


@pytest.fixture
def tokenizer():
    return train_tokenizer([FILES[0].text], 300)


def test_short_files_have_no_span() -> None:
    assert [span.count("\n") for span in spans(FILES)] == [SPAN_LINES]


def test_a_perfect_copier_and_one_that_stops(tokenizer) -> None:
    span = spans(FILES)[0]
    period = len(tokenizer(span + "\n")["input_ids"])
    perfect = copying(Reciter(period, 10**6), tokenizer, FILES)
    assert (perfect.whole, perfect.lines, perfect.tokens, perfect.files) == (1.0, 1.0, 1.0, 1)
    shown = "".join(span.splitlines(keepends=True)[: SHOWN_LINES + 13])
    half = copying(Reciter(period, len(tokenizer(shown)["input_ids"])), tokenizer, FILES)
    assert half.whole == 0 and half.lines == pytest.approx(0.5, abs=0.05) and 0.3 < half.tokens < 0.7
    assert copying(Reciter(3, 0), tokenizer, FILES).lines == 0
