"""A pruned copy of a target computes what the chosen layers compute; which channels stay; what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from torch import Tensor

from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.train.defaults import Pruning
from forerun.train.draft.prune import check_size, check_start, chosen_layers, pruned_copy, step_parameters
from tools.lm import Architecture, build_model, train_tokenizer

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "eos_token_id": 3, "bos_token_id": None,
}  # fmt: skip
TEXT = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
KINDS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=4)),
}


def drawn(kind: str = "llama") -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model = KINDS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.eval()


def by_hand(model: tf.PreTrainedModel, layers: list[int]) -> Tensor:
    """Logits of the model with the other layers taken out of it."""
    model.model.layers = torch.nn.ModuleList(model.model.layers[layer] for layer in layers)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(layers)]
    logits: Tensor = model(TEXT, use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_computes_what_the_chosen_layers_compute(kind: str) -> None:
    target = drawn(kind)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    copy = pruned_copy(target, Pruning(layers="0,1,4"), TEXT)
    assert copy.config.num_hidden_layers == 3 and copy.dtype == torch.float32
    assert all(not parameter.is_meta and parameter.requires_grad for parameter in copy.parameters())
    found = copy(TEXT, use_cache=False).logits
    with torch.no_grad():
        copy.model.layers[0].mlp.up_proj.weight.zero_()  # the copy's weights are its own
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    torch.testing.assert_close(found, by_hand(target, [0, 1, 4]))


@pytest.mark.parametrize("by", ["activation", "weight"])
def test_channels_that_add_nothing_go_first(by: str) -> None:
    """Half of the channels have no effect: the narrowed copy computes what the whole one does."""
    target = drawn()
    idle = torch.arange(1, 24, 2)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight[:, idle] *= 1e-9
    whole = pruned_copy(target, Pruning(layers="1,3"), TEXT)(TEXT, use_cache=False).logits
    narrow = pruned_copy(target, Pruning(layers="1,3", width=12, by=by), TEXT)
    assert narrow.config.intermediate_size == 12
    assert narrow.model.layers[1].mlp.gate_proj.weight.shape == (12, 32)
    torch.testing.assert_close(narrow(TEXT, use_cache=False).logits, whole, atol=1e-4, rtol=1e-4)


def test_activations_and_weights_rank_differently() -> None:
    """A channel that reads what is never there goes by activation, and stays for its long weights."""
    target = drawn()
    layer = target.model.layers[2]
    with torch.no_grad():
        layer.post_attention_layernorm.weight[0] = 0
        layer.mlp.gate_proj.weight[5] = 100 * torch.eye(32)[0]
    column = layer.mlp.down_proj.weight[:, 5:6]
    for by, kept in (("weight", True), ("activation", False)):
        copy = pruned_copy(target, Pruning(layers="2", width=20, by=by), TEXT)
        assert bool((copy.model.layers[0].mlp.down_proj.weight == column).all(0).any()) == kept


def test_what_the_target_proposed_is_not_inherited() -> None:
    target = drawn()
    setattr(target.config, OUTPUT_TOKENS, [1, 2])
    assert OUTPUT_TOKENS not in vars(pruned_copy(target, Pruning(layers="0"), TEXT).config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,x", "must be layer numbers with commas"),
        ("", "must be layer numbers"),
        ("3,1", "layers must rise"),
        ("1,1", "layers must rise"),
        ("0,5", "the target's layers are 0 to 4"),
        ("-1,2", "the target's layers are 0 to 4"),
    ],
)
def test_layers_that_are_not_there_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_layers(text, 5)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="prune_width is 25"):
        pruned_copy(drawn(), Pruning(layers="0", width=25), TEXT)
    with pytest.raises(ConfigError, match="no effect without --prune-layers"):
        Pruning(width=3)
    with pytest.raises(ConfigError, match="prune_by is 'luck'"):
        Pruning(layers="0", by="luck")
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(ConfigError, match="model type 'gpt2' with these options adds to Llama's"):
        pruned_copy(gpt2, Pruning(layers="0"), TEXT)


def test_a_copys_size_is_judged_by_what_a_token_costs() -> None:
    sizes = Architecture(vocab_size=1000, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    tied = build_model(sizes, 0, 0)
    inner = tied.num_parameters() - 32_000
    assert step_parameters(tied) == inner + 32_000 and step_parameters(tied, 100) == inner + 3_200
    untied = build_model(sizes, 0, 0)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    assert step_parameters(untied) == inner + 32_000 and step_parameters(untied, 100) == inner + 3_200
    most = 4 * inner + 4 * 32 * 200
    check_size(tied, most, 200)
    with pytest.raises(
        ConfigError, match=rf"more than a quarter of its target's {most:,}.*output_tokens to 200 at most"
    ):
        check_size(tied, most, 201)
    with pytest.raises(ConfigError, match=rf"Without its output layer it has {inner:,}: keep fewer layers"):
        check_size(tied, inner, 200)


def test_a_start_with_other_tokens_is_refused() -> None:
    sizes = Architecture(vocab_size=300, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
    target, start = build_model(sizes, 0, 0), build_model(sizes, 0, 1)
    ours, other = train_tokenizer(["def value"], 300), train_tokenizer(["return other"], 300)
    check_start(start, ours, target, ours)
    with pytest.raises(IncompatibleDrafterError, match="the draft to start from cannot draft for the target"):
        check_start(start, other, target, ours)
    with pytest.raises(ConfigError, match="has 301 tokens and its target 300"):
        check_start(build_model(replace(sizes, vocab_size=301), 0, 0), ours, target, ours)
