"""The start of a draft: a pruned copy of its target, with some of its layers and feed-forward channels.

A channel of the feed-forward part is one column of its last matrix: it adds |activation| times that column to the
residual. Its score is the product of the column's length and the mean |activation| on text, or, by weights alone, of
its rows' lengths in the two other matrices.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.models.decoders import llama_refusal
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.train.accelerator import micro_tokens, model_vocabulary
from forerun.train.defaults import Pruning
from forerun.utils.vocabulary import Vocabulary, check_same_tokens

MAX_SHARE = 0.25
"""Largest share of its target's work a token that a draft may cost."""
LEAST_OUTPUTS = 128
"""Output tokens that are advised, at least."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def step_parameters(model: PreTrainedModel, num_outputs: int | None = None) -> int:
    """Count the parameters that every token is computed with: all but those of the embedding.

    num_outputs: rows of the output layer that are computed; None for all.
    """
    embedding: Tensor = model.get_input_embeddings().weight
    head: Tensor = model.get_output_embeddings().weight
    inner: int = sum(parameter.numel() for parameter in model.parameters() if parameter is not embedding)
    if head is not embedding:
        inner -= head.numel()
    return inner + (len(head) if num_outputs is None else num_outputs) * head.shape[1]


def check_start_given(start: Path | None, pruning: Pruning) -> None:
    """Check that there is exactly one start: a folder, or layers of the target.

    Raises:
        ConfigError: two starts are given, or none.
    """
    if start is not None and pruning.layers is not None:
        raise ConfigError("--start and --prune-layers are two starts of one draft. Leave one of the two out.")
    if start is None and pruning.layers is None:
        raise ConfigError(
            "A draft starts from trained weights. Give layers of the target to keep (--prune-layers) or a trained "
            "draft (--start)."
        )


def check_size(draft: PreTrainedModel, target_parameters: int, num_outputs: int | None = None) -> None:
    """Refuse a draft whose step costs more than a quarter of its target's, by `step_parameters` of both.

    Raises:
        ConfigError: with both sizes, and with what would be small enough.
    """
    parameters = step_parameters(draft, num_outputs)
    most = int(MAX_SHARE * target_parameters)
    if parameters <= most:
        return
    inner = step_parameters(draft, 0)
    room = (most - inner) // draft.get_output_embeddings().weight.shape[1]
    if room >= LEAST_OUTPUTS:
        remedy = f"Set the key output_tokens to {room:,} at most"
    else:
        remedy = (
            f"Without its output layer it has {inner:,}: keep fewer layers (--prune-layers) or channels (prune_width)"
        )
    raise ConfigError(
        f"a draft that computes each token with {parameters:,} parameters has more than a quarter of its target's "
        f"{target_parameters:,} ({most:,}), and would cost more than it saves. {remedy}."
    )


def check_start(
    start: PreTrainedModel,
    start_tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse a model to start from whose tokens are not the target's.

    Raises:
        ConfigError: it has another number of them.
        IncompatibleDrafterError: names the first that differs.
    """
    ours = model_vocabulary(target)
    theirs = model_vocabulary(start)
    if ours != theirs:
        raise ConfigError(
            f"The draft to start from has {theirs:,} tokens and its target {ours:,}. Start from a draft of this "
            "target, or leave --start out."
        )
    check_same_tokens(
        Vocabulary("the target", ours, tokenizer), Vocabulary("the draft to start from", theirs, start_tokenizer)
    )


def chosen_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Parse `--prune-layers` for a target of so many layers.

    Raises:
        ConfigError: they are not some of its layers in rising order.
    """
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--prune-layers is {text!r}, but must be layer numbers with commas: 0,1,28,29.") from None
    if any(a >= b for a, b in pairwise(layers)):
        raise ConfigError(f"--prune-layers is {text}, but layers must rise, each named once.")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError(f"--prune-layers is {text}, but the target's layers are 0 to {num_layers - 1}.")
    return layers


def pruned_copy(target: PreTrainedModel, pruning: Pruning, text: Tensor) -> PreTrainedModel:
    """Copy the target with fewer layers and channels, in float32 on the CPU; `target` stays as it is.

    Args:
        pruning: with layers.
        text: int64 [rows, T] token ids, on which activations are measured.

    Raises:
        ConfigError: the target has no such layers or channels, or is not of the Llama family.
    """
    refusal = llama_refusal(target.config)
    if refusal is not None:
        raise ConfigError(
            f"A pruned copy can be made of targets of the Llama family, and of this one not: {refusal}. "
            "Give a draft by --start."
        )
    assert pruning.layers is not None
    layers = chosen_layers(pruning.layers, target.config.num_hidden_layers)
    available: int = target.config.intermediate_size
    width = pruning.width or available
    if width > available:
        raise ConfigError(f"prune_width is {width:,}, but the target's layers have {available:,} such channels.")
    kept = _kept_channels(target, layers, width, pruning.by, text)
    config = _config(target.config, layers, width)
    with torch.device("meta"):
        pruned = type(target)._from_config(config, dtype=torch.float32)
    weights = _weights(target, layers, kept)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    pruned.load_state_dict(weights, assign=True)
    pruned.tie_weights()
    pruned.model.rotary_emb = copy.deepcopy(target.model.rotary_emb).to("cpu")  # buffers that no file holds
    pruned.generation_config = copy.deepcopy(target.generation_config)
    return pruned.requires_grad_(True)


def _config(config: Any, layers: Sequence[int], width: int) -> Any:
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(layers)
    config.intermediate_size = width
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    if hasattr(config, OUTPUT_TOKENS):
        delattr(config, OUTPUT_TOKENS)
    return config


def _weights(target: PreTrainedModel, layers: Sequence[int], kept: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the copy's tensors by name, in float32."""
    position = {layer: index for index, layer in enumerate(layers)}
    weights = {}
    for name, tensor in target.state_dict().items():
        found = _LAYER.fullmatch(name)
        if found is None:
            weights[name] = tensor
        elif (layer := int(found[1])) in position:
            weights[f"model.layers.{position[layer]}.{found[2]}"] = _narrowed(found[2], tensor, kept[layer])
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in weights.items()}


def _narrowed(name: str, tensor: Tensor, kept: Tensor) -> Tensor:
    if name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        return tensor[kept]
    return tensor[:, kept] if name == "mlp.down_proj.weight" else tensor


def _kept_channels(
    target: PreTrainedModel, layers: Sequence[int], width: int, by: str, text: Tensor
) -> dict[int, Tensor]:
    """Return the channels that each layer keeps, rising, by layer."""
    if width == target.config.intermediate_size:
        return dict.fromkeys(layers, torch.arange(width, device=target.device))
    if by == "weight":
        scores = {layer: _weight_scores(target.model.layers[layer].mlp) for layer in layers}
    else:
        scores = _activation_scores(target, layers, text)
    return {layer: each.topk(width).indices.sort().values for layer, each in scores.items()}


def _weight_scores(mlp: Any) -> Tensor:
    gate, up, down = (each.weight.float() for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    scores: Tensor = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    return scores


@torch.inference_mode()
def _activation_scores(target: PreTrainedModel, layers: Sequence[int], text: Tensor) -> dict[int, Tensor]:
    sums: dict[int, Tensor] = {}

    def add(layer: int, _: nn.Module, inputs: tuple[Tensor]) -> None:
        total = inputs[0].float().abs().flatten(0, -2).sum(0)
        sums[layer] = sums[layer] + total if layer in sums else total

    modules = {layer: target.model.layers[layer].mlp.down_proj for layer in layers}
    handles = [module.register_forward_pre_hook(partial(add, layer)) for layer, module in modules.items()]
    try:
        for rows in torch.split(text, max(1, micro_tokens(target) // text.shape[1])):
            target(input_ids=rows.to(target.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return {layer: sums[layer] * module.weight.float().norm(dim=0) for layer, module in modules.items()}
