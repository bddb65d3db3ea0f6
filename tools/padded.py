"""Cost-padded models: the same text at the cost of a model many times the size.

Extra layers whose output projections are zero add nothing to the residual stream, and extra
feed-forward columns whose down-projection is zero add nothing to a layer's output. Both are computed
in full, so a small machine can measure speculation at the cost ratio of a large target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.errors import ConfigError
from forerun.files.write import refuse_to_overwrite, write_bytes
from forerun.train.folder import CARD, load, save, write_record
from forerun.train.widened import GRAIN

LAYER_FACTOR = 1.5
"""Layers of the padded model, unless told: the rest of the parameters come from wider layers."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Sizes of a padded model."""

    num_layers: int
    intermediate_size: int
    parameters: int


def plan(config: LlamaConfig, current: int, parameters: int, num_layers: int | None = None) -> Padding:
    """The intermediate size that brings a model of `current` parameters nearest to `parameters`.

    Raises:
        ConfigError: the model is larger already, or `num_layers` is fewer than it has.
    """
    old_layers, hidden, old_width = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    layers = num_layers if num_layers is not None else round(LAYER_FACTOR * old_layers)
    if layers < old_layers:
        raise ConfigError(f"{layers} layers are fewer than the {old_layers} of the model. Give at least as many.")
    attention = hidden * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    fixed = current - old_layers * 3 * hidden * old_width + (layers - old_layers) * (attention + 2 * hidden)
    width = round((parameters - fixed) / (layers * 3 * hidden) / GRAIN) * GRAIN
    if width < old_width:
        least = fixed + layers * 3 * hidden * old_width
        raise ConfigError(
            f"{parameters:,} parameters are fewer than the {least:,} of the model with {layers} layers. "
            "Ask for more parameters or fewer layers."
        )
    return Padding(layers, width, fixed + layers * 3 * hidden * width)


def pad(model: LlamaForCausalLM, padding: Padding, seed: int = 0) -> LlamaForCausalLM:
    """A new model of the sizes of `padding` and the dtype of `model` that computes the same logits.

    Padded weights that do not reach the output are random: zeros would be cheaper on some hardware.
    """
    config = LlamaConfig.from_dict(model.config.to_dict())
    config.num_hidden_layers, config.intermediate_size = padding.num_layers, padding.intermediate_size
    torch.manual_seed(seed)
    padded = LlamaForCausalLM(config).to(model.dtype)
    own = padded.state_dict()
    for name, tensor in own.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    for name, source in model.state_dict().items():
        own[name][tuple(slice(0, size) for size in source.shape)].copy_(source)
    return padded.eval()


def make_padded(
    source: Path, out: Path, parameters: int, num_layers: int | None = None, *, force: bool = False
) -> Padding:
    """Write the cost-padded form of the Llama folder `source` to `out`, with a card that says so.

    Raises:
        ModelLoadError: `source` is no model folder.
        ConfigError: `out` exists, unless it is to be replaced (`force`); the sizes cannot be reached, or the
            architecture is not Llama.
    """
    if not force:
        refuse_to_overwrite(out, ConfigError)
    model, tokenizer = load(source)
    if model.config.model_type != "llama":
        raise ConfigError(
            f"{source} is a {model.config.model_type} model; padding knows the Llama architecture only. "
            "Give a Llama folder."
        )
    padding = plan(model.config, model.num_parameters(), parameters, num_layers)
    padded = pad(model, padding)
    padded.config.forerun_cost_padded = True
    save(padded, tokenizer, out)
    record = {
        "kind": "cost-padded",
        "source": source.name,
        "parameters": padded.num_parameters(),
        "effective_parameters": model.num_parameters(),
        "num_layers": padding.num_layers,
        "intermediate_size": padding.intermediate_size,
    }
    write_record(out, record)
    text = (
        f"# Cost-padded model: {padded.num_parameters():,} parameters\n\n"
        f"This is the {model.num_parameters():,}-parameter model `{source.name}` with layers and feed-forward columns "
        "added whose output projections are zero. It writes the same text, with the same acceptance, at the cost of "
        f"{padding.num_layers} layers of intermediate size {padding.intermediate_size}.\n\n"
        "It is for measuring speed at a realistic ratio of costs. Say that it is cost-padded wherever a figure\n"
        "measured with it appears.\n"
    )
    write_bytes(out / CARD, text.encode(), error=ConfigError)
    return padding
