"""What a number format costs: float32 beside itself costs nothing, and formats are told apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from families import make_family
from forerun.engine import LLM
from forerun.errors import ConfigError
from forerun.export.quantized import export_quantized
from forerun.kernels.cpu import native
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.quality import INT8_CACHE, Scored, compare_formats, scored_texts
from forerun.models import load_model

IDS = [(7 * i + i * i) % 96 for i in range(300)]
"""More than one part of rows."""


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [int(each) for each in text.split()]


def test_what_is_scored(tmp_path: Path) -> None:
    llm = LLM(make_family("llama", tmp_path), None, dtype="float32")
    llm.tokenizer = Tokenizer()  # of the texts alone: the engine has none
    requests = [BenchPrompt("a", "", [1, 2, 3], "4 5"), BenchPrompt("b", "", [6, 7])]
    known, answered = scored_texts(llm, {"w": requests}, max_tokens=4)["w"]
    assert known == Scored([1, 2, 3, 4, 5], 1)
    assert answered.first == 2 and answered.token_ids[:2] == [6, 7] and len(answered.token_ids) == 6


def test_figures_are_those_of_their_definitions(tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path)
    texts = {"all": [Scored(IDS, 1), Scored(IDS[:9], 6)], "late": [Scored(IDS, 280)]}
    formats = ["bfloat16", INT8_CACHE, "int4"]
    rows = {(row.workload, row.number_format): row for row in compare_formats(folder, formats, lambda _: texts)}
    assert rows["all", "int4"].tokens == 299 + 3 and rows["late", "int4"].tokens == 20
    logprobs = {}
    for name, model in {"float32": load_model(folder, "float32"), "int4": load_model(folder, quantize="int4")}.items():
        from forerun.models import Rows

        logits = model.forward([Rows(model.new_cache(), IDS[:-1])]).logits
        logprobs[name] = logits.double().log_softmax(-1)[279:]
    row, wanted = rows["late", "int4"], torch.tensor(IDS[280:])[:, None]
    means = {name: float(each.gather(1, wanted).mean()) for name, each in logprobs.items()}
    assert row.perplexity == pytest.approx(math.exp(-means["int4"]), rel=1e-4)
    assert row.reference_perplexity == pytest.approx(math.exp(-means["float32"]), rel=1e-4)
    assert row.lost == pytest.approx(row.perplexity / row.reference_perplexity - 1, abs=1e-4)
    theirs, ours = logprobs["float32"], logprobs["int4"]
    assert row.divergence == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(1).mean()), rel=1e-3)
    assert row.agreement == pytest.approx(float((theirs.argmax(1) == ours.argmax(1)).double().mean()))
    assert rows["all", "bfloat16"].divergence < rows["all", "int4"].divergence
    if native() is not None:
        assert 0 < rows["all", INT8_CACHE].divergence != rows["all", "bfloat16"].divergence


def test_codes_have_no_float32_model_to_compare_with(tmp_path: Path) -> None:
    export_quantized(make_family("llama", tmp_path), tmp_path / "int8", "int8")
    with pytest.raises(ConfigError, match=r"holds int8 weights.*Give the model that they were made from"):
        compare_formats(tmp_path / "int8", ["int4"], lambda _: {"all": [Scored(IDS, 1)]})


def test_float32_beside_itself_costs_nothing(tmp_path: Path) -> None:
    (row,) = compare_formats(make_family("llama", tmp_path), ["float32"], lambda _: {"all": [Scored(IDS, 1)]})
    assert (row.lost, row.divergence, row.agreement) == (0, pytest.approx(0, abs=1e-12), 1)
