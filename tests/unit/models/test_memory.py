"""The planned memory of a model against the memory of the loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from families import make_family
from forerun.kernels.block_weight import BLOCK_TYPES
from forerun.kernels.cpu import native
from forerun.models import Model, Rows, load_model
from forerun.models.memory_plan import ModelMemory, model_memory
from gguf_files import write_gguf

TOLERANCE = 0.02
"""Biases and tables of the rotation are not planned."""
_NOT_WEIGHTS = {"ropes", "cos_sin", "_cos_sin", "inverse_frequencies", "inv_freq", "planner", "attention"}


def tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors that an object holds, except those that are not weights."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = [part for key, part in thing.items() if key not in _NOT_WEIGHTS]
    elif isinstance(thing, (list, tuple)):
        parts = list(thing)
    elif isinstance(thing, nn.Module) or type(thing).__module__.startswith("forerun"):
        names = getattr(thing, "__slots__", ()) if is_dataclass(thing) else ()
        parts = [getattr(thing, name) for name in names]
        parts += [part for key, part in getattr(thing, "__dict__", {}).items() if key not in _NOT_WEIGHTS]
    for part in parts:
        yield from tensors(part, seen)


def held(model: Model) -> int:
    """Return the bytes of the weights, counting each storage once."""
    places = {}
    for tensor in tensors(model.decoder, set()):
        place = id(tensor) if tensor.is_mkldnn else tensor.data_ptr()
        if tensor.device.type == "cpu":
            places[place] = max(places.get(place, 0), tensor.numel() * tensor.element_size())
    return sum(places.values())


def check(name: str | Path, **arguments: Any) -> ModelMemory:
    planned, model = model_memory(name, **arguments), load_model(name, **arguments)
    model.forward([Rows(model.new_cache(), [1, 2, 3])])  # what is made when it is first needed
    assert planned.weights == pytest.approx(held(model), rel=TOLERANCE)
    assert planned.loading >= planned.weights
    assert planned.page_nbytes == model.pool.page_nbytes
    assert planned.pages_for(1000) == model.new_cache().pages_wanted(min(1000, model.context_length))
    assert (planned.vocab_size, planned.context_length) == (model.vocab_size, model.context_length)
    assert planned.number_format == model.quantize or planned.number_format == str(model.dtype)[6:]
    return planned


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantize": "int8"}, {"quantize": "int4"}],
    ids=lambda each: next(iter(each.values())),
)
def test_the_bundled_model(arguments: dict[str, str]) -> None:
    check("bundled", **arguments)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral", "gemma4_text"])
@pytest.mark.parametrize("arguments", [{}, {"dtype": "float32"}, {"quantize": "int4"}])
def test_other_families(name: str, arguments: dict[str, str], tmp_path: Path) -> None:
    options = {"num_experts": 16} if name == "gemma4_text" else {}  # routers of fewer fill up blocks of outputs
    check(make_family(name, tmp_path, **options), **arguments)


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("arguments", [{}, {"dtype": "float64"}, {"quantize": "int8"}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma4_text"])
def test_the_references_in_pytorch(name: str, arguments: dict[str, str], tmp_path: Path) -> None:
    check(make_family(name, tmp_path), **arguments)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_model_that_proposes_a_part_of_its_vocabulary(
    is_tied: bool, quantize: str | None, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", kernels)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=512, tie_word_embeddings=is_tied, **sizes))
    model.config.output_token_ids = list(range(0, 512, 4))
    model.save_pretrained(tmp_path)
    check(tmp_path, quantize=quantize)


@pytest.fixture
def small() -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("type_name", "quantize"),
    [("Q4_0", "int4"), ("Q8_0", "int8"), ("Q8_0", "int4"), ("Q4_1", "none"), *((name, None) for name in BLOCK_TYPES)],
)
def test_a_gguf_file(small: tf.PreTrainedModel, type_name: str, quantize: str | None, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", small, type_name)
    planned = check(tmp_path / "model.gguf", quantize=quantize)
    if quantize is None and native() is not None:
        assert planned.number_format == type_name and planned.loading < 1.05 * planned.weights


def test_blocks_of_a_gguf_file_are_kept(small: tf.PreTrainedModel, tmp_path: Path) -> None:
    """Check Q4_0, which has no minima, unlike int4 of other files."""
    write_gguf(tmp_path / "blocks.gguf", small, "Q4_0")
    write_gguf(tmp_path / "numbers.gguf", small, "F32")
    kept, made = (model_memory(tmp_path / f"{name}.gguf", quantize="int4") for name in ("blocks", "numbers"))
    assert kept.weights < made.weights


def test_what_is_held_while_matrices_are_quantized(tmp_path: Path) -> None:
    """Compare the peak: Transformers' modules hold float32 until they are quantized; the fused decoder's matrices are
    streamed."""
    folder = make_family("codegen", tmp_path)
    entries = sum(parameter.numel() for parameter in tf.AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert model_memory(folder, quantize="int4").loading > 3 * entries
    bundled = model_memory("bundled", quantize="int4")
    assert bundled.loading < 2 * bundled.weights


def test_no_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    assert model_memory(folder).weights > 0
    assert model_memory(folder, dtype="float32").dtype == torch.float32
