"""Weights in the layouts in which other programs publish them: their numbers, bits and text, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import make_family
from forerun import LLM, SamplingParams
from forerun.config import INSTRUCTIONS
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.export.quantized import export_quantized
from forerun.export.transformers import export_hf
from forerun.kernels.cpu import native, references
from forerun.models import Model, Rows, load_model
from forerun.models.fused.native import NativeDecoder
from forerun.models.loading.published import codes_of
from forerun.models.memory_plan import model_memory
from kernel_cases import using
from publications import PUBLICATIONS, publish

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 3
INTEGERS = [name for name, each in PUBLICATIONS.items() if each.served]
_OF_8_BITS = ("GPTQ, 8 bits", "W8A16, zeros", "W8A8", "LLM.int8()", "torchao int8")
_QUICK = ("AWQ", "W8A8", "MXFP4", "FP8 in blocks")
ALL = [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.slow) for name in PUBLICATIONS]


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if native() is None:
        pytest.skip("there are no native kernels here")


def logits(model: Model, prompt: list[int] = PROMPT) -> Tensor:
    return model.forward([Rows(model.new_cache(), prompt)]).logits


@pytest.mark.parametrize("name", ALL)
def test_numbers_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """Activations of 16 bits are rounded to 2^-15 of a row's largest, those of 8 bits to 2^-7 of 32 inputs' largest."""
    folder, theirs = publish(name, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    numbers = load_model(folder, "float32", quantize="none")
    assert numbers.quantize is None
    torch.testing.assert_close(logits(numbers), expected, atol=5e-5, rtol=1e-5)
    model, served = load_model(folder, "float32"), PUBLICATIONS[name].served
    assert model.quantize == served and model.exactness.exact and isinstance(model.decoder, NativeDecoder)
    is_exact = served is None or name in _OF_8_BITS
    most = 1e-5 if served is None else 5e-4 if is_exact else 0.05
    assert (logits(model) - expected).norm() < most * expected.norm()
    if served is not None:  # the integers are the published ones, to the bit
        kept = model.decoder._kept["model.layers.1.self_attn.k_proj.weight"]
        assert not isinstance(kept, Tensor)
        weight = theirs.get_parameter("model.layers.1.self_attn.k_proj.weight")
        torch.testing.assert_close(kept.rows(torch.arange(len(weight))), weight, atol=0, rtol=1e-6)
    if is_exact:
        ours = LLM(model).generate([PROMPT], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        with torch.no_grad():
            found = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert list(ours[0].token_ids) == found[0, len(PROMPT) :].tolist()


SOME = ("GPTQ, 4 bits", "W8A16, zeros")
EACH_SET = [
    pytest.param(name, which, marks=[] if name in SOME and which == "avx2" else pytest.mark.slow)
    for name in INTEGERS
    for which in INSTRUCTIONS
]


@pytest.mark.parametrize(("name", "which"), EACH_SET)
def test_bits_in_any_batch_and_text_with_drafts(name: str, which: str, tmp_path: Path) -> None:
    with using(which):
        model = load_model(publish(name, tmp_path)[0])
        assert model.exactness.exact and model.quantize == PUBLICATIONS[name].served
        alone = logits(model)
        for count in (2, 5, 9, 17):
            rows = [Rows(model.new_cache(), PROMPT[index:] if index else PROMPT) for index in range(count)]
            assert torch.equal(model.forward(rows).logits[: len(alone)], alone), count
        by_one, cache = [], model.new_cache()
        for token in PROMPT:
            by_one.append(model.forward([Rows(cache, [token])]).logits)
            cache.commit([0])
        assert torch.equal(torch.cat(by_one), alone)
        prompts = [PROMPT, PROMPT[::-1], [7] * 9]
        drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True)
        texts = [
            [each.token_ids for each in LLM(model, drafter, **options).generate(prompts, drawn)]
            for drafter, options in ((None, {}), ("suffix", {"num_draft_tokens": 4}), ("early-exit:exit_layer=1", {}))
        ]
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("name", ["AWQ", pytest.param("MXFP4", marks=pytest.mark.slow)])
def test_the_memory_plan_is_of_the_integers(name: str, tmp_path: Path) -> None:
    folder = publish(name, tmp_path)[0]
    plan, model = model_memory(folder), load_model(folder)
    assert plan.number_format == PUBLICATIONS[name].served
    assert isinstance(model.decoder, NativeDecoder)
    kept = model.decoder._kept.values()
    assert plan.weights == pytest.approx(sum(each.nbytes for each in kept), rel=0.03)


def test_other_decoders_and_float16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = publish("AWQ", tmp_path)[0]
    with caplog.at_level(logging.WARNING):
        models = [load_model(folder, "float64"), load_model(folder, "float16")]
    lines = [record.getMessage().partition("AWQ: ")[2] for record in caplog.records]
    assert [model.quantize for model in models] == [None, "awq"] and models[1].dtype == torch.bfloat16
    assert lines[0].startswith(
        "tensors are computed as float64 and not as they are stored: 14 of AWQ. The native fused"
    )
    assert lines[1] == "dtype is float16, in which nothing is computed; bfloat16 is taken."


@pytest.mark.slow
@pytest.mark.parametrize("of_outputs", [False, True])
@pytest.mark.parametrize("size", [(70, 19), (64, 16), (1, 1)])
def test_codes_of_words_are_the_same_without_the_library(size: tuple[int, int], of_outputs: bool) -> None:
    words = torch.randint(-(2**31), 2**31, size).int()
    with references():
        expected = [codes_of(each, of_outputs=of_outputs) for each in (words, words.T)]
    found = [codes_of(each, of_outputs=of_outputs) for each in (words, words.T)]
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_exports_adapters_and_the_general_decoder_take_the_numbers(tmp_path: Path) -> None:
    folder, theirs = publish("AWQ", tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    general = load_model(folder, "float32", kind="general")
    assert general.quantize is None
    torch.testing.assert_close(logits(general), expected, atol=5e-5, rtol=1e-5)
    export_quantized(folder, tmp_path / "int8", "int8")
    assert torch.equal(logits(load_model(tmp_path / "int8")), logits(load_model(folder, quantize="int8")))
    export_hf(folder, tmp_path / "hf", "float32")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    torch.testing.assert_close(logits(load_model(tmp_path / "hf", "float32")), expected, atol=5e-5, rtol=1e-5)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(theirs, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted.merge_and_unload()(torch.tensor([PROMPT])).logits[0]
    merged = load_model(folder, "float32", adapter=tmp_path / "adapter")
    torch.testing.assert_close(logits(merged), expected, atol=5e-5, rtol=1e-5)


def test_bytes_with_a_scale_for_each_output_are_int8_as_they_are(tmp_path: Path) -> None:
    folder = publish("W8A8", tmp_path)[0]
    kept, made = (load_model(folder, "float32", quantize=each).decoder for each in (None, "int8"))
    assert isinstance(kept, NativeDecoder) and isinstance(made, NativeDecoder)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(*(each._kept[name].rows(torch.arange(256)) for each in (kept, made)))  # type: ignore[union-attr]


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
Q = "model.layers.1.self_attn.q_proj"
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "no tensors": ("FP8", lambda t, c: c.update(quant_method="awq"), "stored as F8_E4M3.*config.json says"),
    "nothing is quantized": ("FP8", lambda t, c: (t.clear(), t.update(of_floats())), "by fp8, and none is"),
    "not named": ("AWQ", lambda t, c: c.clear(), "quantized by a program that is not named"),
    "a part": ("W4A16", lambda t, c: t.pop(f"{Q}.weight_scale"), rf"tensor {Q}\.weight_packed is stored as I32"),
    "NaN": ("AWQ", lambda t, c: t[f"{Q}.scales"].fill_(torch.nan), rf"AWQ weight {Q}\.weight .*scale is NaN or inf"),
    "NaN of FP8": ("FP8", lambda t, c: t[f"{Q}.weight_scale"].fill_(torch.nan), rf"{Q}\.weight .*NaN or infinity"),
    "NaN of MXFP4": (
        "MXFP4",
        lambda t, c: t["model.layers.1.mlp.experts.down_proj_scales"].fill_(255),
        r"tensor model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight: row 0 has a scale that is NaN",
    ),
    "a group": ("AWQ", lambda t, c: c.update(group_size=48), r"\d groups of 48 integers of 4 bits do not fit rows of"),
    "groups": (
        "W4A16",
        lambda t, c: t.update({f"{Q}.weight_scale": torch.ones(128, 3, dtype=torch.bfloat16)}),
        "3 groups of 128 integers of 4 bits do not fit rows of 128",
    ),
    "outputs": (
        "W4A16",
        lambda t, c: t.update({f"{Q}.weight_scale": torch.ones(64, 1, dtype=torch.bfloat16)}),
        r"\[128, 128\] codes, \[64, 1\] scales",
    ),
    "three bits": (
        "GPTQ, 4 bits",
        lambda t, c: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :12]}),
        r"q_proj\.weight .*integers of 3 bits",
    ),
    "no such group": ("GPTQ, act-order", lambda t, c: t[f"{Q}.g_idx"].fill_(2), "whose inputs are in groups 2 to 2"),
    "codes": (
        "W8A8",
        lambda t, c: c["config_groups"]["group_0"]["weights"].update(num_bits=4),
        "a code has more than 4 bits",
    ),
    "a block": ("FP8 in blocks", lambda t, c: c.update(weight_block_size=[32, 32]), "scales of blocks of 32"),
    "a table": ("NF4", lambda t, c: t.update({f"{Q}.weight.quant_map": torch.zeros(3)}), "cannot be read"),
}


def of_floats() -> dict[str, Tensor]:
    return {"model.embed_tokens.weight": torch.zeros(96, 128)}


_PLAIN = ("nothing is quantized", "a part", "NaN", "a group", "no such group")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _PLAIN else pytest.mark.slow) for name in DAMAGE]
)
def test_what_cannot_be_is_an_error_with_its_tensor(name: str, tmp_path: Path) -> None:
    published, change, said = DAMAGE[name]
    folder = publish(published, tmp_path)[0]
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file({key: each.contiguous() for key, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "bitnet"}, "bitnet"),
        ({"bits": 4, "group_size": 64}, "MLX"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors, marlin-24"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
            "compressed-tensors, with transforms",
        ),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, "gptq, gptq_p"),
        ({"quant_method": "awq", "version": "gemv"}, "awq, gemv"),
        ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
    ],
)
@pytest.mark.parametrize("inner", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["outside", "text_config"])
def test_what_has_no_way_on_a_cpu_is_refused_by_name(
    said: dict[str, Any], named: str, inner: bool, tmp_path: Path
) -> None:
    folder = make_family("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    config = {"model_type": "llava", "text_config": config} if inner else config
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"quantized by {named}.* no way to compute on a CPU") as caught:
        load_model(folder)
    assert "float weights" not in str(caught.value)


def test_codes_that_no_configuration_names(tmp_path: Path) -> None:
    folder = publish("GPTQ, 8 bits", tmp_path)[0]
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match=r"g_idx is stored as I32, as quantized weights are, and config\.json does"
    ):
        load_model(folder)


@pytest.mark.slow
def test_auto_round_names_a_layout(tmp_path: Path) -> None:
    folder = publish("GPTQ, 4 bits", tmp_path)[0]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    del config["quantization_config"]["checkpoint_format"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).quantize == "gptq"


@pytest.mark.parametrize("quantize", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "int4"))])
def test_float16_is_served_in_other_formats(quantize: str | None, tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({key: each.half() for key, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    found = {
        dtype: load_model(folder, dtype, quantize=quantize) for dtype in ("bfloat16", "float16", "float32", "auto")
    }
    assert [model.dtype for model in found.values()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert torch.equal(logits(found["bfloat16"]), logits(found["float16"]))
    assert torch.equal(logits(found["float32"]), logits(found["auto"]))
    with pytest.raises(ConfigError, match="dtype is 'float16', in which nothing is computed"):
        export_hf(folder, tmp_path / "out", "float16")
