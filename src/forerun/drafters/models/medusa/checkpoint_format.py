"""Medusa heads in the form that vLLM reads: config.json with model_type "medusa", and tensors of the names of
`MedusaConfig.tensors`, or those of the original repository ("K.LAYER.linear.weight", "K.LAYERS.weight"), whose file
is another, and whose config.json may say no more than the numbers of heads and layers.

Beside these: `token_map`, [truncated_vocab_size] int64, the target's tokens that the heads can propose. The output rows
are `lm_head.weight` with original_lm_head, else `lm_heads.K.weight`; rows of the whole vocabulary are cut by the map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.models.heads.config import (
    OUTPUT,
    StoredHead,
    as_stored,
    check_loaded,
    check_shape,
    checked_d2t,
    proposed_tokens,
    refuse_features,
)
from forerun.drafters.models.heads.weights_file import WEIGHTS, Slice, open_head_slices
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

FORM = "medusa"
_ORIGINAL = "medusa_num_heads"
TOKEN_MAP = "token_map"
_OUTPUT = re.compile(r"^lm_heads?\.(\d+\.)?weight$")


def is_medusa(settings: Fields) -> bool:
    """Return whether config.json describes Medusa heads."""
    named = settings.values.get("model_type") == FORM or _ORIGINAL in settings
    return named or "MedusaModel" in settings.list_of("architectures", str, [])


def read_medusa(folder: Path, settings: Fields, num_layers: int | None) -> StoredHead[MedusaConfig]:
    """Read public Medusa heads.

    Args:
        settings: what their config.json says.
        num_layers: of the target, after whose last one the state is that they read.

    Raises:
        ModelLoadError: they are damaged, their files contradict each other, or `num_layers` is needed.
        UnsupportedModelError: they are intact, but of an unsupported kind.
    """
    source = str(folder)
    with as_load_errors(f"{folder}: the weights are damaged", REMEDY):
        stored = open_head_slices(folder)
        config = medusa_config_of(settings, stored, num_layers)
        found = _renamed(stored, config, source)
        d2t = checked_d2t(_offsets(found.pop(TOKEN_MAP, None), config, source), config, source, ModelLoadError, REMEDY)
        has_biases = settings.flag("medusa_fc_bias", not (folder / WEIGHTS).is_file())
        tensors = _with_biases(found, has_biases, config, source)
        tensors = {name: _cut(name, tensor, d2t, config) for name, tensor in tensors.items()}
        check_loaded(config, tensors, source, ModelLoadError, REMEDY)
        return StoredHead(config, tensors, d2t, form="Medusa")


def medusa_config_of(settings: Fields, stored: Mapping[str, Slice], num_layers: int | None) -> MedusaConfig:
    """Return the configuration of public heads. stored: their tensors. The rest, and errors, as of `read_medusa`."""
    if settings.values.get("logit_scale", 1) != 1:
        raise UnsupportedModelError(f"{settings.place}: logit_scale is served as 1 alone.")
    if num_layers is None:
        raise ModelLoadError(
            f"{settings.place}: which state of its target Medusa heads read depends on the target's number of layers. "
            "Give the target too (--model)."
        )
    layers = _count(settings, "layers", ("num_hidden_layers", "medusa_num_layers"))
    rows = stored.get(f"0.{layers}.weight")
    given = {} if rows is None else dict(zip(("vocab_size", "hidden_size"), rows.get_shape(), strict=False))
    settings = replace(settings, values={**given, **settings.values})
    vocab = settings.integer("vocab_size", low=1)
    try:
        return MedusaConfig(
            vocab_size=vocab,
            draft_vocab_size=settings.integer("truncated_vocab_size", vocab, low=1),
            target_hidden_size=settings.integer("hidden_size", low=1),
            num_heads=_count(settings, "heads", ("num_heads", _ORIGINAL)),
            num_layers=layers,
            layers=(num_layers,),
            output_rows="one" if settings.flag("original_lm_head", False) else "each",
        )
    except ConfigError as failure:
        raise ModelLoadError(f"{settings.place}: {failure} {REMEDY}") from None


def medusa_settings(config: MedusaConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of heads that the format can represent. dtype: of the tensors, such as "float32"."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": FORM,
        "dtype": dtype,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": config.output_rows != "each",
    }


def medusa_tensors(
    config: MedusaConfig, tensors: Mapping[str, Tensor], d2t: Tensor | None, output_rows: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors.

    Args:
        config: of the heads to be written; `tensors` may be of more of them.
        output_rows: [draft_vocab_size, hidden] of the target, for heads without rows of their own.
    """
    kept = {name: tensors[name].to(dtype) for name in config.tensors()}
    if config.output_rows == "target":
        kept[OUTPUT] = output_rows.to(dtype)
    if d2t is not None:
        kept[TOKEN_MAP] = proposed_tokens(d2t)
    return as_stored(kept)


def exported_medusa_config(
    config: MedusaConfig, d2t: Tensor | None, form: str, num_heads: int | None, what: str
) -> MedusaConfig:
    """Return the configuration of the heads to be written. vLLM drafts with every head in the file.

    Args:
        num_heads: of them; None for all.

    Raises:
        UnsupportedModelError: names all that the format cannot represent.
        ConfigError: there are not so many heads.
    """
    reasons = {
        f"form {form}, which has no Medusa": form != FORM,
        "heads that know the tokens drafted so far (sequential)": config.sequential,
        "an order of the output tokens that is not the target's": (
            config.draft_vocab_size == config.vocab_size and d2t is not None
        ),
    }
    refuse_features(reasons, f"{what} cannot be written for vLLM", "Train heads without: forerun train medusa.")
    count = config.num_heads if num_heads is None else num_heads
    if count > config.num_heads:
        raise ConfigError(
            f"{what} has {config.num_heads} heads, which draft no {count} tokens. Ask for {config.num_heads} or fewer."
        )
    return replace(config, num_heads=count, accuracies=())


def _count(settings: Fields, what: str, names: tuple[str, str]) -> int:
    """Return a number that has one of two names. Programs accept any key with "num" and the word for it, where it does
    not have the second name, which is of the authors."""
    ambiguous = [key for key in settings.values if "num" in key and what in key and key not in names]
    if ambiguous and names[1] not in settings:
        raise ModelLoadError(
            f"{settings.place}: {ambiguous[0][:60]} would be taken for {names[0]} by some programs. Leave it out."
        )
    present = [name for name in names if name in settings]
    return settings.integer(present[0] if present else names[0], low=1)


def _renamed(stored: Mapping[str, Slice], config: MedusaConfig, source: str) -> dict[str, Slice]:
    """Return the tensors by the names of `MedusaConfig.tensors`."""
    found: dict[str, Slice] = {}
    for name, each in stored.items():
        own_name = re.sub(r"^medusa_heads?\.", "", name)
        own_name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", own_name)
        own_name = re.sub(rf"^(\d+)\.{config.num_layers}\.weight$", r"lm_heads.\1.weight", own_name)
        if config.output_rows == "one" and own_name == "lm_heads.0.weight":
            own_name = "lm_head.weight"
        if own_name in found:
            raise ModelLoadError(f"{source}: the tensor {name[:100]} is there under two names. {REMEDY}")
        found[own_name] = each
    return found


def _offsets(token_map: Slice | None, config: MedusaConfig, source: str) -> Tensor | None:
    """Return the offsets of a token map: the target's id of draft token i is i + offsets[i]."""
    size = config.draft_vocab_size
    if token_map is None:
        return torch.zeros(size, dtype=torch.int64) if size < config.vocab_size else None
    tokens = token_map[...]
    if list(tokens.shape) != [size] or tokens.dtype not in (torch.int16, torch.int32, torch.int64):
        raise ModelLoadError(
            f"{source}: token_map is {list(tokens.shape)} of {str(tokens.dtype).removeprefix('torch.')}, but must be "
            f"[{size}] whole numbers, as truncated_vocab_size says. {REMEDY}"
        )
    return tokens.to(torch.int64) - torch.arange(size)


def _with_biases(found: Mapping[str, Slice], has: bool, config: MedusaConfig, source: str) -> dict[str, Tensor]:
    """Read all tensors; biases are zeros where there are none. has: whether there are."""
    tensors: dict[str, Tensor] = {}
    for name, each in found.items():
        if _OUTPUT.match(name):
            shape = list(each.get_shape())
            whole = [config.vocab_size, config.target_hidden_size]
            if shape != whole:
                check_shape(name, each, (config.draft_vocab_size, whole[1]), source, ModelLoadError, REMEDY)
        tensors[name] = each[...]
        if name.endswith(".bias") and not has and bool(tensors[name].any()):
            raise ModelLoadError(
                f"{source}: there is {name[:100]}, but config.json does not say medusa_fc_bias, without which vLLM "
                "leaves biases out. Set it to true, if the heads were trained with them."
            )
    for name, wanted in config.tensors().items():
        weight = tensors.get(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and not has and name not in tensors and weight is not None:
            tensors[name] = torch.zeros(wanted, dtype=weight.dtype)
    return tensors


def _cut(name: str, tensor: Tensor, d2t: Tensor | None, config: MedusaConfig) -> Tensor:
    """Select the draft vocabulary's rows of an output layer that has the whole vocabulary's."""
    if not _OUTPUT.match(name) or len(tensor) == config.draft_vocab_size:
        return tensor
    ids = torch.arange(config.draft_vocab_size)
    return tensor[ids if d2t is None else ids + d2t].contiguous()
