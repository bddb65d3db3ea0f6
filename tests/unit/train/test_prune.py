"""A cut model computes what the chosen layers compute; which layers and channels stay; what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers as tf
from torch import Tensor

from families import DESCRIBED, VOCAB, make_family, tiny_model
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.models import LanguageModel, load_model
from forerun.models.families.table import spec_of
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.train.checkpoint import Weights
from forerun.train.defaults import Pruning
from forerun.train.draft.prune import (
    check_size,
    check_start,
    chosen_layers,
    cut,
    layer_influence,
    named_layers,
    narrow,
    step_parameters,
    switch_off_dropout,
    target_parameters,
)
from tools.lm import Architecture, build_model, train_tokenizer

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "eos_token_id": 3, "bos_token_id": None,
}  # fmt: skip
TEXT = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
REASONS = "experts|recurrent layers|read embeddings of their own|read the keys of others|depends on their place"


def drawn() -> tf.LlamaForCausalLM:
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.eval()


def target_of(vocab_size: int) -> LanguageModel:
    return cast(LanguageModel, SimpleNamespace(vocab_size=vocab_size))


def passed(_: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """A hook by which a layer does nothing."""
    return (inputs[0], *outputs[1:]) if isinstance(outputs, tuple) else inputs[0]


@torch.inference_mode()
def without(model: tf.PreTrainedModel, skipped: Sequence[int]) -> Tensor:
    """The logits of a model some of whose layers do nothing."""
    spec = spec_of(model.config)
    layers: Any = model.get_submodule(f"{spec.base}.{spec.layer_list}")
    handles = [layers[layer].register_forward_hook(passed) for layer in skipped]
    logits: Tensor = model(TEXT, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("family", DESCRIBED)
def test_a_family_computes_what_the_kept_layers_compute_or_is_refused_with_its_reason(family: str) -> None:
    model = tiny_model(family)
    spec = spec_of(model.config)
    last = len(spec.layers) - 1
    if spec.experts is not None or spec.recurrence is not None or spec.attention is None:
        with pytest.raises(ConfigError, match=f"of type '{model.config.model_type}', cannot be cut.*({REASONS})"):
            cut(model, [last])
        return
    wanted = without(model, range(last))
    cut(model, [last])
    assert model.config.num_hidden_layers == 1
    with torch.inference_mode():
        torch.testing.assert_close(model(TEXT, use_cache=False).logits, wanted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi", "olmo3"])
def test_a_layer_that_does_nothing_is_found_and_left_out(family: str) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family in ("gemma3_text", "olmo3") else {}
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = tiny_model(family, **layers, **kinds)
    spec = spec_of(model.config)
    lazy: Any = model.get_submodule(f"{spec.base}.{spec.layer_list}")[2]
    handle = lazy.register_forward_hook(passed)
    influence = layer_influence(model, TEXT)
    assert influence[2].abs() < 1e-6 and (influence[[0, 1, 3]] > 1e-3).all() and (influence < 2).all()
    kept = chosen_layers(model, "3", TEXT)
    assert kept == (0, 1, 3)
    with torch.inference_mode():
        wanted = model(TEXT, use_cache=False).logits
    handle.remove()
    cut(model, kept)
    with torch.inference_mode():
        torch.testing.assert_close(model(TEXT, use_cache=False).logits, wanted)


def test_influence_is_how_far_the_residual_is_turned() -> None:
    model = drawn()
    with torch.inference_mode():
        states = model(TEXT, use_cache=False, output_hidden_states=True).hidden_states
    entering, leaving = states[1][:, 1:], states[2][:, 1:]
    cosines = (entering * leaving).sum(-1) / (entering.norm(dim=-1) * leaving.norm(dim=-1))
    assert float(layer_influence(model, TEXT)[1]) == pytest.approx(float((1 - cosines).mean()), rel=1e-4)


def test_layers_that_are_named_are_kept_and_what_the_start_proposed_is_not() -> None:
    model = drawn()
    setattr(model.config, OUTPUT_TOKENS, [1, 2])
    wanted = without(model, [2, 3])
    cut(model, chosen_layers(model, "0,1,4", TEXT))
    assert OUTPUT_TOKENS not in vars(model.config) and model.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    torch.testing.assert_close(model(TEXT).logits, wanted)  # with a cache, which finds layers by these numbers


@pytest.mark.parametrize("options", [("gpt2", {}), ("opt", {}), ("llama", {"attention_dropout": 0.5})])
def test_training_draws_nothing(options: tuple[str, dict[str, float]]) -> None:
    family, others = options
    model = tiny_model(family, **others).train()
    with torch.inference_mode():
        assert not torch.equal(*(model(TEXT, use_cache=False).logits for _ in range(2)))
        switch_off_dropout(model)
        found = model(TEXT, use_cache=False).logits
        torch.testing.assert_close(found, model.eval()(TEXT, use_cache=False).logits)


def test_ends_of_text_are_no_property_of_layers() -> None:
    model = tiny_model("llama", eos_token_id=[1, 2])
    cut(model, [1])
    assert model.config.eos_token_id == [1, 2]


def test_layers_whose_keys_others_read_are_refused() -> None:
    model = tiny_model("gemma4_text", enable_moe_block=False, num_experts=None, hidden_size_per_layer_input=0)
    with pytest.raises(ConfigError, match=r"'gemma4_text', cannot be cut.*read the keys of others"):
        layer_influence(model, TEXT)


@pytest.mark.parametrize("by", ["activation", "weight"])
def test_channels_that_add_nothing_go_first(by: str) -> None:
    """Half of the channels have no effect: the narrowed model computes what the whole one does."""
    model = drawn()
    idle = torch.arange(1, 24, 2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, idle] *= 1e-9
    cut(model, [1, 3])
    whole = model(TEXT, use_cache=False).logits
    narrow(model, Pruning(width=12, by=by), TEXT)
    assert model.config.intermediate_size == 12
    assert model.model.layers[1].mlp.gate_proj.weight.shape == (12, 32)
    torch.testing.assert_close(model(TEXT, use_cache=False).logits, whole, atol=1e-4, rtol=1e-4)


def test_activations_and_weights_rank_differently() -> None:
    """A channel that reads what is never there goes by activation, and stays for its long weights."""
    for by, kept in (("weight", True), ("activation", False)):
        model = drawn()
        cut(model, [2])
        layer = model.model.layers[0]
        with torch.no_grad():
            layer.post_attention_layernorm.weight[0] = 0
            layer.mlp.gate_proj.weight[5] = 100 * torch.eye(32)[0]
        column = layer.mlp.down_proj.weight[:, 5:6].clone()
        narrow(model, Pruning(width=20, by=by), TEXT)
        assert bool((layer.mlp.down_proj.weight == column).all(0).any()) == kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,x", "must be a number of layers"),
        ("", "must be a number of layers"),
        ("0", "the start has 5 layers. Give 1 to 5"),
        ("6", "the start has 5 layers. Give 1 to 5"),
        ("3,1", "layers must rise"),
        ("1,1", "layers must rise"),
        ("0,5", "the start's layers are 0 to 4"),
        ("-1,2", "the start's layers are 0 to 4"),
    ],
)
def test_layers_that_are_not_there_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_layers(text, 5)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="prune_width is 25"):
        narrow(drawn(), Pruning(width=25), TEXT)
    with pytest.raises(ConfigError, match="prune_by is 'luck'"):
        Pruning(layers="0", by="luck")
    with pytest.raises(ConfigError, match="model type 'gpt2' with these options adds to Llama's"):
        narrow(tiny_model("gpt2"), Pruning(width=3), TEXT)


def test_a_drafts_size_is_judged_by_what_a_token_costs() -> None:
    sizes = Architecture(vocab_size=1000, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    tied = build_model(sizes, 0, 0)
    inner = tied.num_parameters() - 32_000
    assert step_parameters(tied) == inner + 32_000 and step_parameters(tied, 100) == inner + 3_200
    untied = build_model(sizes, 0, 0)
    untied.lm_head.weight = torch.nn.Parameter(-untied.lm_head.weight.detach())
    assert step_parameters(untied) == inner + 32_000 and step_parameters(untied, 100) == inner + 3_200
    most = 4 * inner + 4 * 32 * 200
    check_size(tied, most, 200)
    with pytest.raises(
        ConfigError, match=rf"more than a quarter of its target's {most:,}.*output_tokens to 200 at most"
    ):
        check_size(tied, most, 201)
    with pytest.raises(ConfigError, match=rf"Without its output layer it has {inner:,}: keep fewer layers"):
        check_size(tied, inner, 200)
    for model in (tied, untied):
        assert target_parameters(cast(LanguageModel, Weights(model))) == step_parameters(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_of_experts_those_of_a_token_count(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    experts = [part for name, part in model.named_parameters() if ".experts." in name]
    idle = sum(part.numel() // len(part) * (len(part) - model.config.num_experts_per_tok) for part in experts)
    target = load_model(make_family(family, tmp_path))
    assert target_parameters(target) == step_parameters(model) - idle < step_parameters(model)


def test_a_start_with_other_tokens_is_refused_and_padding_is_none() -> None:
    sizes = Architecture(vocab_size=300, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
    start = build_model(sizes, 0, 1)
    ours, other = train_tokenizer(["def value"], 300), train_tokenizer(["return other"], 300)
    check_start(start, ours, target_of(300), ours)
    with pytest.raises(IncompatibleDrafterError, match="the draft to start from cannot draft for the target"):
        check_start(start, other, target_of(300), ours)
    used = max(ours.get_vocab().values()) + 1
    for size in (used, 300, 400):
        check_start(build_model(replace(sizes, vocab_size=size), 0, 0), ours, target_of(300), ours)
    with pytest.raises(ConfigError, match=f"computes {used - 1} tokens, but its tokenizer has {used}"):
        check_start(build_model(replace(sizes, vocab_size=used - 1), 0, 0), ours, target_of(300), ours)
    assert VOCAB > 50  # TEXT is of tokens that all families have
