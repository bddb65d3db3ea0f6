"""Models that propose a part of their vocabulary: only the rows of those tokens are computed, the others are -inf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor

from families import VOCAB, make_family
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.export.quantized import export_quantized
from forerun.export.transformers import export_hf
from forerun.kernels.cpu import native
from forerun.models import Model, Rows, load_draft_model, load_model
from forerun.models.draft_session import Pick
from forerun.models.fused.native import NativeDecoder
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.models.loading.gguf.source import GgufSource
from gguf_files import TINY, write_gguf

native_only = pytest.mark.skipif(native() is None, reason="only the native kernels compute a part of the outputs")
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


NATIVE_CASES = [case for case in CASES if case[0] != "float64" and case[2] is None]


@native_only
@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("dtype", "quantize"), [case[:2] for case in NATIVE_CASES])
def test_blocks_hold_these_tokens_first_and_have_the_bits_of_the_whole_model(
    dtype: str, quantize: str | None, is_tied: bool, tmp_path: Path
) -> None:
    folder = tied_llama(tmp_path) if is_tied else make_family("qwen2", tmp_path)
    compare(load_model(folder, dtype, quantize=quantize), load_model(say(folder, PROPOSED), dtype, quantize=quantize))


@native_only
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_blocks_of_files_are_brought_into_that_order(
    type_name: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**TINY, "vocab_size": VOCAB, "hidden_size": 256}, tie_word_embeddings=is_tied)
    write_gguf(tmp_path / "it.gguf", tf.LlamaForCausalLM(config), type_name)
    whole = load_model(tmp_path / "it.gguf")
    monkeypatch.setattr(GgufSource, "output_tokens", lambda source, config: tuple(PROPOSED))
    compare(whole, load_model(tmp_path / "it.gguf"))


def compare(whole: Model, model: Model) -> None:
    blocks = np.array([0, 2, (VOCAB - 1) // 16], np.int32)
    order = [*PROPOSED, *(token for token in range(VOCAB) if token not in PROPOSED)]
    tokens = [token for block in blocks.tolist() for token in order[16 * block : 16 * block + 16]]
    part = model.of_outputs(blocks)
    assert part is not None and isinstance(model.decoder, NativeDecoder) and isinstance(part.decoder, NativeDecoder)
    expected = logits(whole)
    assert torch.equal(logits(part), expected[:, tokens])
    assert torch.equal(logits(model)[:, PROPOSED], expected[:, PROPOSED])
    session = part.draft_session([part.new_cache()], Pick(len(tokens), with_probability=True))
    assert session is not None
    found = session.advance([TOKENS])
    assert torch.equal(found.logits, expected[-1:, tokens]) and found.columns == [int(expected[-1, tokens].argmax())]
    every = torch.arange(VOCAB)
    assert torch.equal(part.embedding_rows(every), whole.embedding_rows(every))
    assert torch.equal(model.decoder.output_rows(every), whole.output_rows(every))
    assert part.output_layer is None and whole.output_layer is not None  # its rows are not tokens
    kept = model.decoder.lm_head.nbytes
    assert model.decoder.weight_bytes < whole.decoder.weight_bytes - kept // 2  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        part.embedding_rows(torch.tensor([-1]))


def test_exports_propose_the_same_tokens(tmp_path: Path) -> None:
    folder = say(make_family("llama", tmp_path), PROPOSED)
    export_hf(folder, tmp_path / "hf", "float32")
    assert torch.equal(logits(load_model(tmp_path / "hf", "float32")), logits(load_model(folder, "float32")))
    export_quantized(folder, tmp_path / "int8", "int8")
    exported = load_model(tmp_path / "int8", "float32")
    assert torch.equal(logits(exported), logits(load_model(folder, "float32", quantize="int8")))
