"""Models that propose a part of their vocabulary: only the rows of those tokens are computed, the others are -inf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from families import VOCAB, make_family
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.export.quantized import export_quantized
from forerun.export.transformers import export_hf
from forerun.models import Model, Rows, load_draft_model, load_model
from forerun.models.loading.configuration import OUTPUT_TOKENS

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PROPOSED = [1, 2, 5, 6, 30, 31, 32, 33, 34, 60, 95]


def say(folder: Path, tokens: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {OUTPUT_TOKENS: tokens}))
    return folder


def logits(model: Model) -> Tensor:
    return model.forward([Rows(model.new_cache(), TOKENS)]).logits


def tied_llama(folder: Path) -> Path:
    """Build a Llama without biases whose embedding is its output layer."""
    make_family("llama", folder)
    model = tf.AutoModelForCausalLM.from_pretrained(folder / "llama")
    model.config.tie_word_embeddings = True
    tied = tf.LlamaForCausalLM(model.config)
    tied.load_state_dict({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, strict=False)
    tied.save_pretrained(folder / "tied")
    return folder / "tied"


CASES = [
    ("float64", None, None), ("float32", None, None), ("float32", "int8", "reference"), ("bfloat16", None, None),
    ("bfloat16", "int8", None), ("bfloat16", "int4", None),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("dtype", "quantize", "kernels"), CASES)
def test_logits_are_the_whole_models_where_it_proposes(
    dtype: str,
    quantize: str | None,
    kernels: str | None,
    is_tied: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels is not None:
        monkeypatch.setenv("FORERUN_KERNELS", kernels)
    folder = tied_llama(tmp_path) if is_tied else make_family("qwen2", tmp_path)
    whole = logits(load_model(folder, dtype, quantize=quantize))
    model = load_draft_model(say(folder, PROPOSED), dtype, quantize=quantize)
    part = logits(model)
    if dtype != "float64":  # the linear algebra library multiplies, and a row's bits may depend on the number of rows
        assert model.exactness.exact, model.exactness.reason
    assert part.shape == whole.shape and part.dtype == whole.dtype and model.vocab_size == VOCAB
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    torch.testing.assert_close(part[:, PROPOSED], whole[:, PROPOSED], atol=tolerance, rtol=tolerance)
    others = [token for token in range(VOCAB) if token not in PROPOSED]
    assert bool((part[:, others] == -torch.inf).all())
    first = model.forward_first([Rows(model.new_cache(), TOKENS)], 1)[1]
    assert first.shape == part.shape and bool((first[:, others] == -torch.inf).all())


@pytest.mark.parametrize("tokens", [[], [2, 1], [1, 1], [-1, 3], [0, VOCAB], ["a"], 7])
def test_what_is_no_part_of_the_vocabulary_is_refused(tokens: object, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"{OUTPUT_TOKENS} is .* but must be a list"):
        load_model(say(make_family("llama", tmp_path), tokens))


def test_other_families_and_heads_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"only the fused decoder serves: model type 'codegen'"):
        load_model(say(make_family("codegen", tmp_path), PROPOSED))
    llama = say(make_family("llama", tmp_path), PROPOSED)
    with pytest.raises(UnsupportedModelError, match="only the fused decoder serves"):
        load_model(llama, kind="general")
    with pytest.raises(UnsupportedModelError, match="proposes 11 of its 96 tokens"):
        load_model(llama).output_rows(torch.tensor([1]))


def test_exports_propose_the_same_tokens(tmp_path: Path) -> None:
    folder = say(make_family("llama", tmp_path), PROPOSED)
    export_hf(folder, tmp_path / "hf", "float32")
    assert torch.equal(logits(load_model(tmp_path / "hf", "float32")), logits(load_model(folder, "float32")))
    export_quantized(folder, tmp_path / "int8", "int8")
    exported = load_model(tmp_path / "int8", "float32")
    assert torch.equal(logits(exported), logits(load_model(folder, "float32", quantize="int8")))
