"""Models that the native kernels compute, beside the same models computed by the references."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor

from families import DESCRIBED, VOCAB, make_family, tiny_config
from forerun.config import QUANTISATIONS
from forerun.errors import UnsupportedModelError
from forerun.kernels.cpu import native, references
from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.torch.linear import PackedLinear
from forerun.models import Model, Rows, identity, load_model
from forerun.models.decoders import llama_refusal
from forerun.models.families.table import spec_of
from forerun.models.fused.native import NativeDecoder
from forerun.models.linear import FloatMaker, Linear, LinearPart
from kernel_cases import THREADS, threads

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 12
FAMILIES = (*DESCRIBED, "gpt2")


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if native() is None:
        pytest.skip("there are no native kernels here")


def logits(model: Model) -> Tensor:
    """Return the logits of a prompt over several pages, whose last rows come one by one and as a tree."""
    cache = model.new_cache()
    parts = [model.forward([Rows(cache, TOKENS[:-2])]).logits]
    cache.commit(range(len(TOKENS) - 2))
    parts.append(model.forward([Rows(cache, [7, TOKENS[-2], TOKENS[-1]], [-1, -1, 1])]).logits[1:])
    return torch.cat(parts)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("quantize", [None, *QUANTISATIONS])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_the_references(
    family: str, quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(family, tmp_path)
    # in bfloat16, a row with nearly equal scores goes to other experts
    dtype = "float32" if spec_of(tiny_config(family)).experts is not None else "bfloat16"
    model = load_model(folder, dtype, quantize=quantize)
    assert model.exactness.exact
    ours = logits(model)
    if family in DESCRIBED:
        assert isinstance(model.decoder, NativeDecoder)
    else:
        modules = model.decoder.model.modules()  # type: ignore[attr-defined]
        assert quantize is None or any(isinstance(module, NativeLinear) for module in modules)
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    reference = load_model(folder, dtype, quantize=quantize)
    assert not isinstance(reference.decoder, NativeDecoder)
    theirs = logits(reference)
    # in bfloat16, what the references round at each step stays in a state
    most = 0.1 if family in DESCRIBED and reference.decoder.spec.recurrence else 0.03  # type: ignore[attr-defined]
    assert (ours - theirs).norm() < most * theirs.norm()


@pytest.mark.parametrize(("family", "quantize"), [("llama", None), ("qwen3", "int4"), ("mistral", "int8-a8")])
def test_bits_are_the_same_with_any_number_of_threads(family: str, quantize: str | None, tmp_path: Path) -> None:
    model, found = load_model(make_family(family, tmp_path), quantize=quantize), []
    for count in THREADS:
        with threads(count):
            found.append(logits(model))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_the_references_but_for_the_order_of_sums(family: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    model = load_model(folder, "float32")
    assert model.exactness.exact and model.kernels.startswith("native ")
    if family not in DESCRIBED:  # of tied weights the embedding is left as it is
        modules = model.decoder.model.modules()  # type: ignore[attr-defined]
        assert not any(isinstance(module, (PackedLinear, torch.nn.Linear)) for module in modules)
    with references():
        theirs = logits(load_model(folder, "float32"))
    assert (logits(model) - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("family", ["qwen3", "lfm3", "qwen3_next", "olmo_hybrid"])
def test_float32_codes_give_nearly_the_bits_of_the_references(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family(family, tmp_path)
    ours = logits(load_model(folder, "float32", quantize="int4"))
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    theirs = logits(load_model(folder, "float32", quantize="int4"))
    # a number that is rounded to another code changes more than a rounding error
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


def tiny(**options: object) -> tf.LlamaConfig:
    """Build a Llama with odd options."""
    shape = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
    return tf.LlamaConfig(**{**shape, "num_attention_heads": 2, "num_key_value_heads": 1, **options})


def test_heads_may_be_very_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tf.LlamaForCausalLM(tiny(head_dim=2048)).save_pretrained(tmp_path)
    ours = logits(load_model(tmp_path))
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    theirs = logits(load_model(tmp_path))
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16},
    ],
)
def test_heads_that_cannot_be_turned_or_grouped_are_refused(options: dict[str, object]) -> None:
    assert llama_refusal(tiny(head_dim=16)) is None
    assert llama_refusal(tiny(**options)) is not None


def test_heads_that_do_not_fit_each_other_are_an_error_on_the_general_path(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16}
    tf.LlamaForCausalLM(tiny(**shape)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="heads"):
        load_model(tmp_path, kind="general")


def test_a_longer_rotation_of_another_thread_leaves_the_one_in_use(tmp_path: Path) -> None:
    model = load_model(make_family("llama", tmp_path))
    decoder = model.decoder
    assert isinstance(decoder, NativeDecoder)
    forward_layers, held = (
        decoder.library.forward_layers,
        [weakref.ref(table) for table in decoder.cos_sin.reaching(1)],
    )

    class Growing:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def forward_layers(self, *arguments: object) -> None:
            decoder.cos_sin.reaching(3000)
            gc.collect()
            assert all(table() is not None for table in held)
            forward_layers(*arguments)

    library, decoder.library = decoder.library, Growing()  # type: ignore[assignment]
    assert model.forward([Rows(model.new_cache(), [1, 2, 3])]).logits.isfinite().all()


class Turning(FloatMaker):
    """Makes layers of weights turned over, as a damaged folder has them."""

    def linear(self, parts: Sequence[LinearPart], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        turned = [LinearPart(part.name, part.weight.detach().T) for part in parts]
        return super().linear(turned, bias, is_head=is_head)


def test_a_layer_of_another_shape_than_the_models_is_refused(native_library: Library) -> None:
    with pytest.raises(ValueError, match="shape"):
        NativeDecoder(tf.LlamaForCausalLM(tiny()), native_library, Turning(partial(NativeLinear, native_library)))


def test_stored_costs_tell_the_kernels_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family("llama", tmp_path)
    ours = load_model(folder)
    assert ours.kernels.startswith("native ") and identity(ours).endswith(ours.kernels)
    assert load_model(folder, "float64").kernels == "reference"
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    assert identity(load_model(folder)) == identity(ours).replace(ours.kernels, "reference")
