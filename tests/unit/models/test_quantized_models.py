"""Models with quantized weights: what they consist of, that they are exact, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import make_family
from forerun import LLM, SamplingParams
from forerun.errors import ConfigError, ModelLoadError
from forerun.export.quantized import export_quantized
from forerun.kernels.cpu import native
from forerun.kernels.quantize import quantize_int4, quantize_int8
from forerun.kernels.torch.linear import JoinedLinear, QuantizedEmbedding, QuantizedLinear
from forerun.models import Model, Rows, identity, load_model, number_format
from forerun.models.families.table import spec_of
from forerun.models.fused.decoder import FusedDecoder
from forerun.models.general import GeneralDecoder
from forerun.models.loading.load import WeightReader
from forerun.models.loading.source import find_source
from forerun.models.loading.transformers_modules import move_to_device
from forerun.models.weight_plan import WeightPlan
from gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("reference_kernels")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SIZES = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def logits(model: Model) -> Tensor:
    return model.forward([Rows(model.new_cache(), PROMPT)]).logits


def drawn_llama(**settings: object) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


def decoder_of(model: Model) -> FusedDecoder:
    assert isinstance(model.decoder, FusedDecoder)
    return model.decoder


def numbers(linear: object) -> Tensor:
    """Return the numbers that a layer of either kind multiplies with."""
    if isinstance(linear, QuantizedLinear):
        return linear.weight.dequantize(torch.float32)
    return linear.weight.to_dense()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        *(("llama", "int8"), ("llama", "int4"), ("gpt2", "int8")),
        *(
            pytest.param(family, quantize, marks=pytest.mark.slow)
            for family in ("qwen2", "qwen3", "gpt2", "mixtral", "phi3")
            for quantize in ("int8", "int4")
        ),
    ],
)
def test_families_are_exact_and_near_their_float_model(family: str, quantize: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    model, plain = load_model(folder, quantize=quantize), load_model(folder, "float32")
    assert model.exactness.exact and model.quantize == quantize == number_format(model)
    error = (logits(model) - logits(plain)).norm() / logits(plain).norm()
    assert error < (0.05 if quantize == "int8" else 0.35)
    if isinstance(model.decoder, GeneralDecoder):
        modules = list(model.decoder.model.modules())
        assert any(isinstance(module, QuantizedLinear) for module in modules)
        assert not any(type(module) is torch.nn.Linear for module in modules)
        bits = {module.weight.bits for module in modules if isinstance(module, QuantizedLinear)}
        assert bits == ({8} if quantize == "int8" else {4, 8})


def test_the_two_paths_agree(tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path)
    fast, general = (load_model(folder, "float32", kind, quantize="int8") for kind in ("fused", "general"))
    assert (logits(fast) - logits(general)).norm() < 0.03 * logits(general).norm()


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_each_weight_becomes(is_tied: bool, tmp_path: Path) -> None:
    drawn_llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path, quantize="int4")
    decoder = decoder_of(model)
    down = quantize_int4(tensors["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(decoder.layers[1].linears["down"].weight.quantized, down.quantized)  # type: ignore[attr-defined]
    outer = quantize_int8(tensors["model.embed_tokens.weight" if is_tied else "lm_head.weight"])
    assert torch.equal(numbers(decoder.lm_head), outer.dequantize(torch.float32))
    assert isinstance(decoder.embedding, QuantizedEmbedding)
    table = quantize_int8(tensors["model.embed_tokens.weight"]).dequantize(torch.bfloat16)
    assert torch.equal(decoder.embedding[torch.arange(48)], table)
    if is_tied:
        assert decoder.embedding.weight is decoder.lm_head.weight  # type: ignore[attr-defined]
    plain = load_model(tmp_path)
    assert model.num_parameters == plain.num_parameters and model.dtype == torch.bfloat16
    assert identity(model) == identity(plain).replace(" cpu", " int4 cpu")


def test_no_float_matrix_is_there_but_the_one_that_is_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_llama().save_pretrained(tmp_path)
    held: list[int] = []
    made = FusedDecoder.__init__

    def watched(self: FusedDecoder, model: tf.PreTrainedModel, *rest: object) -> None:
        held.append(sum(weight.untyped_storage().nbytes() for weight in model.parameters()))
        made(self, model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedDecoder, "__init__", watched)
    load_model(tmp_path, quantize="int8")
    norms = 5 * 64 * 2
    assert held[0] <= norms + 100 * 2


def test_no_device_holds_float_matrices_either(tmp_path: Path) -> None:
    drawn_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    source = find_source(tmp_path)
    config = source.config()
    spec = spec_of(config)
    plan = WeightPlan.of(source, spec, "bfloat16", torch.device("cpu"), "int8", is_fused=True)
    model, _ = WeightReader(source, config, spec, plan, attention=None).read()
    moved = move_to_device(model, torch.device("meta"))
    assert moved.device.type == "meta" and moved.lm_head.weight is moved.model.embed_tokens.weight
    assert sum(weight.untyped_storage().nbytes() for weight in moved.parameters()) <= 5 * 64 * 2 + 100 * 2


@pytest.mark.parametrize("kept", ["both", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_embedding_is_quantized_from_the_numbers_in_the_files(kept: str, tmp_path: Path) -> None:
    """Compare with `forerun quantize`, whatever the dtype of the other tensors."""
    drawn_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    names = ["lm_head.weight", "model.embed_tokens.weight"] if kept == "both" else [kept]
    save_file(tensors | {name: table.clone() for name in names}, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path, "bfloat16", quantize="int8")
    assert torch.equal(numbers(decoder_of(model).lm_head), quantize_int8(table).dequantize(torch.float32))
    export_quantized(tmp_path, tmp_path / "out", "int8")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight.codes"], quantize_int8(table).quantized)


@pytest.mark.parametrize(
    ("type_name", "quantize"),
    [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int4"), ("Q4_1", "int8")],
)
def test_gguf_blocks_of_as_many_bits_are_taken_as_they_are(type_name: str, quantize: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", drawn_llama(), type_name)
    model, plain = load_model(tmp_path / "it.gguf", quantize=quantize), load_model(tmp_path / "it.gguf", "float32")
    assert model.exactness.exact
    theirs = decoder_of(plain).layers[0]
    ours = decoder_of(model).layers[0]
    as_they_are = (type_name == "Q8_0") == (quantize == "int8")
    for name in ("query", "out", "gate", "down"):
        left, right = numbers(ours.linears[name]), numbers(theirs.linears[name])
        assert torch.equal(left, right) == as_they_are
        assert ours.linears[name].weight.bits == (8 if quantize == "int8" else 4)
    # at 8 bits, or as the file has it
    assert torch.equal(numbers(decoder_of(model).lm_head), numbers(decoder_of(plain).lm_head)) == (
        type_name == "Q8_0" or quantize == "int4"
    )


@pytest.mark.parametrize(("type_name", "other", "quantize"), [("Q4_0", "Q4_1", "int4"), ("Q8_0", "Q4_1", "int8")])
def test_parts_in_different_codes_are_kept_in_them(
    type_name: str, other: str, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that query, key and value are one product of the reference, and three of the native kernels."""
    path = tmp_path / "it.gguf"
    write_gguf(path, drawn_llama(), type_name)
    _with_another_type(path, "blk.0.attn_v.weight", other)
    model = load_model(path, "float32", quantize=quantize)
    assert model.exactness.exact
    first, second = (layer.linears["query"] for layer in decoder_of(model).layers)
    assert isinstance(first, JoinedLinear) and not isinstance(second, JoinedLinear)
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    if native() is not None:  # a rounding error may make a code its neighbour, one part of 32,767
        ours = logits(load_model(path, "float32", quantize=quantize))
        assert (ours - logits(model)).norm() < 1e-3 * logits(model).norm()


def _with_another_type(path: Path, changed: str, type_name: str) -> None:
    """Write a file anew with one tensor in another type."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if tensor.name == changed:
            kind = gguf.GGMLQuantizationType[type_name]
            data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data.copy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_that_are_not_finite_are_refused_by_name(quantize: str, tmp_path: Path) -> None:
    drawn_llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        load_model(tmp_path, quantize=quantize)


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"quantize is 'int3', but must be one of int8, int4"):
        LLM(folder, None, quantize="int3")
    with pytest.raises(ConfigError, match="dtype 'float64'"):
        LLM(folder, None, dtype="float64", quantize="int8")
    model = load_model(folder)
    with pytest.raises(ConfigError, match="the target is a loaded model"):
        LLM(model, None, quantize="int8")
    for spec in ("draft-model", "draft-tree", "staged", "cross-vocab"):
        with pytest.raises(ConfigError, match="quantize is 'int2'"):
            LLM(model, f"{spec}:model={folder},quantize=int2")


@pytest.mark.parametrize(
    ("drafter", "quantize"),
    [
        ("draft-model:quantize=int4", "int8"),
        pytest.param("draft-tree:quantize=int8", None, marks=pytest.mark.slow),
        pytest.param("staged:quantize=int4", None, marks=pytest.mark.slow),
    ],
)
def test_the_target_itself_in_fewer_bits_drafts_for_it(drafter: str, quantize: str | None, tmp_path: Path) -> None:
    folder = make_family("llama", tmp_path)
    plain = LLM(folder, None, quantize=quantize).generate(PROMPT, GREEDY)
    llm = LLM(folder, drafter + ",num_draft_tokens=3", quantize=quantize)
    assert llm.exact and llm.generate(PROMPT, GREEDY).token_ids == plain.token_ids
    assert llm.drafter is not None
    assert llm.drafter.model.quantize == drafter.partition("=")[2]  # type: ignore[attr-defined]
    assert llm.target.quantize == quantize
    assert any(drafter.partition("=")[2] in str(part) for part in llm.drafter.traits.cost_key)


def test_codes_are_not_multiplied_in_float64(tmp_path: Path) -> None:
    drawn_llama().double().save_pretrained(tmp_path)
    model = load_model(tmp_path, "auto", quantize="int8")
    assert model.dtype == torch.float32 and model.exactness.exact
    assert load_model(tmp_path, "auto").dtype == torch.float64


def test_a_loaded_draft_model_is_not_quantized(tmp_path: Path) -> None:
    from forerun import DraftModel

    with pytest.raises(ConfigError, match="the draft model is a loaded one"):
        DraftModel(load_model(make_family("llama", tmp_path)), quantize="int4")


def test_an_adapter_is_merged_before_the_weights_are_quantized(tmp_path: Path) -> None:
    import peft

    from forerun.export.transformers import export_hf

    folder, adapter = make_family("llama", tmp_path), tmp_path / "adapter"
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(adapter)
    export_hf(folder, tmp_path / "merged", "float32", adapter=adapter)
    model = load_model(folder, "float32", adapter=adapter, quantize="int8")
    assert torch.equal(logits(model), logits(load_model(tmp_path / "merged", "float32", quantize="int8")))
    assert not torch.equal(logits(model), logits(load_model(folder, "float32", quantize="int8")))
