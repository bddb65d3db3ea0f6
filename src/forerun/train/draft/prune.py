"""The start of a draft: some of the layers of a trained model, and of Llama's family some of their channels.

A layer's influence is how far it turns the residual, 1 - cos(what enters, what leaves), in the mean over text (block
influence, ShortGPT, 2403.03853): a layer that leaves the direction as it is can be left out. A channel of the
feed-forward part is one column of its last matrix: it adds |activation| times that column to the residual. Its score is
the product of the column's length and the mean |activation| on text, or, by weights alone, of its rows' lengths in the
two other matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.drafters.models.heads.fingerprint import Fingerprint, target_fingerprint
from forerun.errors import ConfigError
from forerun.models import LanguageModel
from forerun.models.decoders import llama_refusal
from forerun.models.families.table import description_of
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.models.spec.attention import Rope
from forerun.models.spec.decoder import DecoderSpec, keeps_keys
from forerun.models.spec.layer import LayerSpec
from forerun.train.accelerator import micro_tokens, model_vocabulary
from forerun.train.defaults import Pruning
from forerun.utils.vocabulary import Vocabulary, check_same_tokens, tokens_by_id

MAX_SHARE = 0.25
"""Largest share of its target's work a token that a draft may cost."""
LEAST_OUTPUTS = 128
"""Output tokens that are advised, at least."""


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


def target_parameters(target: LanguageModel) -> int:
    """Count the parameters that a target computes each token with: all but those of an embedding that is not its output
    layer, too, and of experts that a token is not given to, as far as the decoder tells them."""
    found = Fingerprint.parse(target_fingerprint(target))
    assert found is not None
    idle = 0 if found.is_tied else found.vocab_size * found.hidden_size
    spec: DecoderSpec | None = getattr(getattr(target, "decoder", None), "spec", None)
    for layer in () if spec is None else spec.layers:
        if (experts := layer.experts) is not None:
            size = len(experts.experts) * found.hidden_size * experts.moe_intermediate_size
            idle += (experts.num_experts - experts.num_experts_per_tok) * size
    return target.num_parameters - idle


def check_size(draft: PreTrainedModel, of_target: int, num_outputs: int | None = None) -> None:
    """Refuse a draft whose step costs more than a quarter of its target's, by parameters.

    of_target: as `target_parameters` counts them.

    Raises:
        ConfigError: with both sizes, and with what would be small enough.
    """
    parameters = step_parameters(draft, num_outputs)
    most = int(MAX_SHARE * of_target)
    if parameters <= most:
        return
    inner = step_parameters(draft, 0)
    room = (most - inner) // draft.get_output_embeddings().weight.shape[1]
    if room >= LEAST_OUTPUTS:
        remedy = f"Set the key output_tokens to {room:,} at most"
    else:
        remedy = f"Without its output layer it has {inner:,}: keep fewer layers (--layers) or channels (prune_width)"
    raise ConfigError(
        f"a draft that computes each token with {parameters:,} parameters has more than a quarter of its target's "
        f"{of_target:,} ({most:,}), and would cost more than it saves. {remedy}."
    )


def check_start(
    start: PreTrainedModel,
    start_tokenizer: PreTrainedTokenizerBase,
    target: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Refuse a model to start from whose tokens are not the target's.

    Its logits may be fewer or more than the target's: what lies behind the tokenizer's last token is padding.

    Raises:
        ConfigError: it has no logits of some of the tokenizer's tokens.
        IncompatibleDrafterError: names the first that differs.
    """
    theirs = model_vocabulary(start)
    check_same_tokens(
        Vocabulary("the target", target.vocab_size, tokenizer),
        Vocabulary("the draft to start from", theirs, start_tokenizer),
    )
    used = max(tokens_by_id(tokenizer)) + 1
    if theirs < used:
        raise ConfigError(
            f"The draft to start from computes {theirs:,} tokens, but its tokenizer has {used:,}. Start from a whole "
            "model of the target's tokens, or leave --start out."
        )


def switch_off_dropout(model: PreTrainedModel) -> None:
    """Have training compute what inference does, and nothing that is drawn, which a resumed run would draw anew."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def named_layers(text: str, num_layers: int) -> int | tuple[int, ...]:
    """Parse `--layers` for a start of so many layers: how many are kept, or which.

    Raises:
        ConfigError: there are not so many, or they are not some of its layers in rising order.
    """
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--layers is {text!r}, but must be a number of layers, such as 8, or numbers of layers with commas, such "
            "as 0,1,28,29."
        ) from None
    if len(layers) == 1:
        if not 0 < layers[0] <= num_layers:
            raise ConfigError(f"--layers is {text}, but the start has {num_layers} layers. Give 1 to {num_layers}.")
        return layers[0]
    if any(a >= b for a, b in pairwise(layers)):
        raise ConfigError(f"--layers is {text}, but layers must rise, each named once.")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError(f"--layers is {text}, but the start's layers are 0 to {num_layers - 1}.")
    return layers


def chosen_layers(model: PreTrainedModel, layers: str, text: Tensor) -> tuple[int, ...]:
    """Return the layers to keep, rising: those that are named, or those of most influence on text.

    Args:
        layers: `--layers`. text: int64 [rows, T] token ids.

    Raises:
        ConfigError: there are no such layers, or the model cannot be cut.
    """
    found = named_layers(layers, len(_cuttable(model)[1]))
    if isinstance(found, tuple):
        return found
    kept: list[int] = layer_influence(model, text).topk(found).indices.sort().values.tolist()
    return tuple(kept)


def cut(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Leave all layers but these out of the model, rising.

    Raises:
        ConfigError: the model has experts, recurrence, or layers that depend on others or on their place.
    """
    spec, layers = _cuttable(model)
    config: Any = model.config
    for name, value in config.to_dict().items():
        is_of_tokens = name.endswith(("token_id", "token_ids"))
        if isinstance(value, list) and len(value) == len(layers) and not is_of_tokens:  # such as layer_types
            setattr(config, name, [value[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    after = description_of(config).served
    if after is None or [*map(partial(_rotated, after), after.layers)] != [
        _rotated(spec, spec.layers[k]) for k in kept
    ]:
        raise ConfigError(
            f"A model of type {config.model_type!r} cannot be cut to layers {', '.join(map(str, kept))}: what its "
            "layers do depends on their place. Name others by --layers, or train it whole, without --layers."
        )
    list_path = f"{spec.base}.{spec.layer_list}"
    owner = model.get_submodule(list_path.rpartition(".")[0])
    setattr(owner, list_path.rpartition(".")[2], nn.ModuleList(layers[layer] for layer in kept))
    for index, layer in enumerate(model.get_submodule(list_path).children()):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    if hasattr(config, OUTPUT_TOKENS):
        delattr(config, OUTPUT_TOKENS)


def _rotated(spec: DecoderSpec, layer: LayerSpec) -> tuple[LayerSpec, Rope | None]:
    """Return what a layer of a decoder computes, and its rotation, wherever that stands in the decoder's list."""
    own = layer.attention
    if own is None or own.rope is None:
        return layer, None
    return replace(layer, attention=replace(own, rope=0)), spec.ropes[own.rope]


def _cuttable(model: PreTrainedModel) -> tuple[DecoderSpec, nn.ModuleList]:
    """Return what the model computes, and its layers. Raises ConfigError where they cannot be taken out."""
    found = description_of(model.config)
    spec = found.served
    reason = found.refusal
    if spec is not None:
        if spec.experts is not None:
            reason = "it has experts"
        elif spec.recurrence is not None or spec.attention is None:
            reason = "it has recurrent layers"
        elif spec.embeddings.per_layer is not None:
            reason = "its layers read embeddings of their own"
        elif not all(map(keeps_keys, spec.layers)):
            reason = "layers read the keys of others"
    if spec is None or reason is not None:
        raise ConfigError(
            f"The start, of type {model.config.model_type!r}, cannot be cut to some of its layers: {reason}. Give a "
            "model of attention and feed-forward layers by --start, or leave --layers out."
        )
    layers = model.get_submodule(f"{spec.base}.{spec.layer_list}")
    assert isinstance(layers, nn.ModuleList)
    return spec, layers


@torch.inference_mode()
def layer_influence(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Compute the influence of each layer on text, float64 [layers]: 0 for one that does nothing, at most 2.

    text: int64 [rows, T] token ids.
    """
    layers = _cuttable(model)[1]
    sums = torch.zeros(len(layers), dtype=torch.float64)

    def turned(index: int, _: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        after = outputs[0] if isinstance(outputs, tuple) else outputs
        # the first token's state is larger than all others by orders of magnitude in many models
        sums[index] += (
            (1 - F.cosine_similarity(inputs[0][:, 1:].float(), after[:, 1:].float(), dim=-1)).double().sum().cpu()
        )

    _run(model, text, {index: (layer, turned) for index, layer in enumerate(layers)}, after=True)
    return sums / (text.shape[0] * (text.shape[1] - 1))


def _run(
    model: PreTrainedModel,
    text: Tensor,
    observed: dict[int, tuple[nn.Module, Callable[..., None]]],
    *,
    after: bool = False,
) -> None:
    """Compute text with functions that see what enters modules, and what leaves them: each by the module's number."""
    handles = [
        module.register_forward_hook(partial(see, number))
        if after
        else module.register_forward_pre_hook(partial(see, number))
        for number, (module, see) in observed.items()
    ]
    try:
        for rows in torch.split(text, max(1, micro_tokens(model) // text.shape[1])):
            model(input_ids=rows.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()


def narrow(model: PreTrainedModel, pruning: Pruning, text: Tensor) -> None:
    """Leave feed-forward channels out of all layers of a model of the Llama family.

    Args:
        pruning: with the width. text: int64 [rows, T] token ids, on which activations are measured.

    Raises:
        ConfigError: the model has no such channels, or is not of that family.
    """
    refusal = llama_refusal(model.config)
    if refusal is not None:
        raise ConfigError(
            f"prune_width is for starts of the Llama family, and of this one not: {refusal}. Leave it out."
        )
    available: int = model.config.intermediate_size
    assert pruning.width is not None
    if pruning.width > available:
        raise ConfigError(f"prune_width is {pruning.width:,}, but the start's layers have {available:,} such channels.")
    layers: Any = _cuttable(model)[1]
    feed_forwards = [layer.mlp for layer in layers]
    scores = _activation_scores if pruning.by == "activation" else _weight_scores
    for mlp, each in zip(feed_forwards, scores(model, feed_forwards, text), strict=True):
        kept = each.topk(pruning.width).indices.sort().values
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight = nn.Parameter(linear.weight.detach()[kept])
        mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach()[:, kept])
    model.config.intermediate_size = pruning.width


def _weight_scores(_model: PreTrainedModel, feed_forwards: Sequence[Any], _text: Tensor) -> list[Tensor]:
    weights = [
        [each.weight.detach().float() for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)] for mlp in feed_forwards
    ]
    return [gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0) for gate, up, down in weights]


@torch.inference_mode()
def _activation_scores(model: PreTrainedModel, feed_forwards: Sequence[Any], text: Tensor) -> list[Tensor]:
    sums: dict[int, Tensor] = {}

    def add(index: int, _: nn.Module, inputs: tuple[Tensor]) -> None:
        total = inputs[0].float().abs().flatten(0, -2).sum(0)
        sums[index] = sums[index] + total if index in sums else total

    _run(model, text, {index: (mlp.down_proj, add) for index, mlp in enumerate(feed_forwards)})
    return [sums[index] * mlp.down_proj.weight.float().norm(dim=0) for index, mlp in enumerate(feed_forwards)]
