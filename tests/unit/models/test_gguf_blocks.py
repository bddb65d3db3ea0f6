"""GGUF files whose matrices are computed with as they are stored: what is loaded, when, and what is said."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

from forerun import LLM, Eagle, EagleTree, SamplingParams
from forerun.errors import ConfigError, ModelLoadError
from forerun.kernels.block_weight import BLOCK_TYPES
from forerun.kernels.cpu import native
from forerun.models import Rows, load_model, load_transformers_model
from forerun.models.base import identity
from forerun.models.fused.native import NativeDecoder
from forerun.models.loading.weights import progress_to
from gguf_files import TINY, write_gguf
from heads import random_head

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SIZES: dict[str, Any] = {**TINY, "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256}


@pytest.fixture(autouse=True)
def is_native() -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")


def llama(seed: int = 0, **options: Any) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, **options}))
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1  # so that attention has something to choose from
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    return model.forward([Rows(model.new_cache(), PROMPT)]).logits


def type_cases() -> list[Any]:
    """Each type with and without a tied output layer; by default every other type has one."""
    return [
        pytest.param(name, is_tied, marks=[pytest.mark.slow] * (is_tied != number % 2))
        for number, name in enumerate(BLOCK_TYPES)
        for is_tied in (False, True)
    ]


@pytest.mark.parametrize(("type_name", "is_tied"), type_cases())
def test_every_matrix_is_kept_as_it_lies(type_name: str, is_tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    meaning = write_gguf(path, llama(tie_word_embeddings=is_tied), type_name)
    model = load_model(path)
    decoder = model.decoder
    assert isinstance(decoder, NativeDecoder) and model.exactness.exact
    assert (model.quantize, model.dtype) == (type_name, torch.bfloat16)
    for name, numbers in meaning.items():
        if numbers.dim() > 1:
            head = is_tied and name == "model.embed_tokens.weight"
            kept = decoder.lm_head if head else decoder._kept[name]
            assert torch.equal(kept.rows(torch.arange(len(numbers))), numbers), name  # queries and keys in order, too
    assert (decoder.embedding is decoder.lm_head) == is_tied
    in_file = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    unread = 0 if is_tied else decoder.embedding.nbytes
    assert in_file <= decoder.weight_bytes + unread <= 1.05 * in_file

    numbers = load_model(path, "float32", quantize="none")
    expected = logits(numbers)
    assert numbers.quantize is None and identity(model) != identity(load_model(path, quantize="none"))
    assert (logits(model) - expected).norm() < 0.1 * expected.norm()
    with torch.inference_mode():
        theirs = load_transformers_model(path, "float32")(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(expected, theirs, atol=1e-3, rtol=1e-3)


def mixed(path: Path, types: dict[str, str], **keys: Any) -> None:
    """Write a model in Q4_0 but for some parts."""
    write_gguf(path, llama(), lambda name: next((types[part] for part in types if part in name), "Q4_0"), keys)


def test_each_layer_has_its_own_type_and_others_are_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "it.gguf"
    types = {"embed_tokens": "F16", "v_proj": "Q6_K", "layers.0.mlp.down": "Q3_K", "layers.1.mlp.gate": "F32"}
    mixed(path, types, **{"general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_0)})
    with caplog.at_level(logging.WARNING):
        model = load_model(path)
    kept = model.decoder._kept
    kinds = {name: kept[f"model.layers.{name}.weight"].kind for name in ("0.self_attn.v_proj", "1.self_attn.v_proj")}
    floats = [
        name for name in kept if not isinstance(kept[name], torch.Tensor) and kept[name].float_numbers() is not None
    ]
    assert len(set(kinds.values())) == 1 and kept["model.layers.0.mlp.up_proj.weight"].kind not in kinds.values()
    assert [name.removeprefix("model.") for name in floats] == [
        "embed_tokens.weight", "layers.0.mlp.down_proj.weight", "layers.1.mlp.gate_proj.weight"
    ]  # fmt: skip
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{path}: tensors are computed as bfloat16 and not as they are stored: 1 of Q3_K. ")
    assert model.quantize == "Q4_0" and logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("number", "named"),
    [(None, "Q4_0"), ("15", "Q4_0"), (15, "Q4_0"), (99, "Q4_0"), (0, "Q4_0"), (2, "Q4_0"), (18, "Q6_K")],
)
def test_the_file_type_is_that_of_the_file_if_that_can_be(number: object, named: str, tmp_path: Path) -> None:
    mixed(tmp_path / "it.gguf", {"v_proj": "Q6_K"}, **{"general.file_type": number})
    assert load_model(tmp_path / "it.gguf").quantize == named


def test_other_decoders_and_numbers_that_were_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(path, llama(), "Q4_K")
    with caplog.at_level(logging.WARNING):
        models = [load_model(path, kind="general"), load_model(path, "float64")]
        monkeypatch.setenv("FORERUN_KERNELS", "reference")
        models.append(load_model(path))
    assert [model.quantize for model in models] == [None] * 3
    assert [record.getMessage().partition("it.gguf: ")[2][:30] for record in caplog.records] == [
        f"tensors are computed as {each}"[:30] for each in ("bfloat16", "float64", "bfloat16")
    ]
    monkeypatch.delenv("FORERUN_KERNELS")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert (
            load_model(path, quantize="none").quantize is None and load_model(path, quantize="int4").quantize == "int4"
        )
    assert not caplog.records
    with pytest.raises(ConfigError, match="must be one of int8, int4, int8-a8, int4-a16, none, or left out"):
        load_model(path, quantize="Q4_K")


@pytest.mark.parametrize("type_name", ["Q4_1", "Q5_K", "Q6_K", "IQ4_XS"])
def test_a_scale_that_is_no_number_is_named(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(path, llama(), type_name)
    tensor = next(each for each in gguf.GGUFReader(path, "r+").tensors if each.name == "blk.1.attn_k.weight")
    place = {"Q6_K": 208}.get(type_name, 0)
    tensor.data[7, place : place + 2] = np.array([np.nan], np.float16).view(np.uint8)
    tensor.data.base.flush() if hasattr(tensor.data.base, "flush") else None
    del tensor
    named = r"it\.gguf: tensor model\.layers\.1\.self_attn\.k_proj\.weight: row \d+ has a scale that is NaN .* Download"
    with pytest.raises(ModelLoadError, match=named):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "the file has been cut off while it was in use"),
        (lambda path: os.utime(path, (1, 1)), "the file was changed while it was read"),
    ],
    ids=["cut off", "written"],
)
@pytest.mark.parametrize("quantize", [None, "none"])
def test_a_file_that_changes_while_it_is_read(
    quantize: str | None, change: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(path, llama(), "Q8_0")
    with progress_to(lambda *_: change(path)), pytest.raises(ModelLoadError, match=said):
        load_model(path, quantize=quantize)


def test_a_file_that_is_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    path, other = tmp_path / "it.gguf", tmp_path / "other.gguf"
    write_gguf(path, llama(), "Q8_0")
    write_gguf(other, llama(1), "Q8_0")
    expected = logits(load_model(path))
    with progress_to(lambda *_: other.replace(path) if other.exists() else None):
        assert torch.equal(logits(load_model(path)), expected)
    assert not torch.equal(logits(load_model(path)), expected)


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_text_is_the_same_with_every_kind_of_draft(type_name: str, tmp_path: Path) -> None:
    path, draft = tmp_path / "it.gguf", tmp_path / "draft.gguf"
    write_gguf(path, llama(), type_name)
    write_gguf(draft, llama(1, num_hidden_layers=1), type_name)
    target = load_model(path)
    prompts = [PROMPT * 3, PROMPT[::-1] * 2, [7] * 5]

    def answers(drafter: Any) -> list[list[int]]:
        llm = LLM(target, drafter, num_draft_tokens=0 if drafter is None else 4)
        return [answer.token_ids for params in (GREEDY, SEEDED) for answer in llm.generate(prompts, params)]

    expected = answers(None)
    head = random_head(target, draft_vocab_size=40)
    for drafter in ("suffix", "early-exit:exit_layer=1", draft, path, Eagle(head), EagleTree(head)):
        assert answers(drafter) == expected, drafter
