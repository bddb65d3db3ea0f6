"""Public heads as folders: EAGLE-1, EAGLE-3 (as vLLM reads them), the `speculators` forms of EAGLE-3 and of blocks, and
DFlash.

Their tensors have the names of `EagleConfig.tensors` or `BlockConfig.tensors`, the layer of an EAGLE-3 head `midlayer`
or `layers.0`. Beside these there may be a copy of the target's embedding (`embed_tokens.weight`), whose signs are a
fingerprint: a head with embeddings of its own is refused as one of another target. `t2d` repeats
`d2t`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.models.block.checkpoint_format import block_config_of, is_block
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.checkpoint_format import SPECULATORS, eagle_config_of
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.heads.config import (
    D2T,
    OUTPUT,
    T2D,
    HeadConfig,
    StoredHead,
    check_finite,
    check_forms,
    check_shape,
    checked_d2t,
)
from forerun.drafters.models.heads.fingerprint import embedding_fingerprint
from forerun.drafters.models.heads.weights_file import WEIGHTS, Slice, open_head_slices
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

EMBEDDING = "embed_tokens.weight"
ASSISTANT = "_assistant"
"""How the model types of Gemma's heads end."""


def read_public(folder: Path, settings: Fields, num_layers: int | None) -> StoredHead[HeadConfig]:
    """Read a public head.

    Args:
        settings: what its config.json says.
        num_layers: of the target; None if that is not known, which an EAGLE-3 head can do without that names its
            layers.

    Raises:
        ModelLoadError: it has pickled weights only, is damaged, or its files contradict each other.
        UnsupportedModelError: it is intact, but of an unsupported kind.
    """
    source = str(folder)
    with as_load_errors(f"{folder / WEIGHTS}: the weights are damaged", REMEDY):
        stored = open_head_slices(folder)
        config = public_config_of(settings, stored, source, num_layers)
        is_eagle_3 = isinstance(config, EagleConfig) and config.version == 3
        return _head(config, _renamed(stored, source) if is_eagle_3 else stored, settings, source)


def public_config_of(
    settings: Fields, stored: Mapping[str, Slice], source: str, num_layers: int | None
) -> EagleConfig | BlockConfig:
    """Return the configuration of a public EAGLE or block head.

    Args:
        settings, num_layers: as of `read_public`.
        stored: its tensors by name, which are not read.

    Raises:
        ModelLoadError, UnsupportedModelError: as `read_public`.
    """
    config: EagleConfig | BlockConfig
    has_output_rows = OUTPUT in stored
    kind = settings.string("model_type", "")
    if kind.endswith(ASSISTANT):
        raise UnsupportedModelError(
            f"{settings.place}: model_type is {kind[:40]!r}. Such a head attends to keys and values of its target's "
            "last layers, which no target hands out here. Take another drafter."
        )
    if is_block(settings):
        config = block_config_of(settings, stored, num_layers=num_layers)
    else:
        version = 3 if _is_eagle_3(settings, stored) else 1
        if version == 1 and has_output_rows:
            raise UnsupportedModelError(
                f"{source}: an EAGLE-1 head with an output layer of its own ({OUTPUT}) is not served. Give one that "
                "uses its target's."
            )
        names = _renamed(stored, source) if version == 3 else stored
        config = eagle_config_of(settings, names, version=version, num_layers=num_layers)
    if not has_output_rows and config.draft_vocab_size < config.vocab_size:
        raise ModelLoadError(f"{source}: {OUTPUT} is missing, the output layer of the draft vocabulary. {REMEDY}")
    return config


def _head(
    config: EagleConfig | BlockConfig, found: dict[str, Slice], settings: Fields, source: str
) -> StoredHead[HeadConfig]:
    fingerprint = _fingerprint(found.pop(EMBEDDING, None), config, source)
    offsets, mask = (found.pop(name)[...] if name in found else None for name in (D2T, T2D))
    d2t = checked_d2t(offsets, config, source, ModelLoadError, REMEDY)
    _check_mask(mask, d2t, config, source)
    wanted = config.tensors()
    check_forms(config, found, source, ModelLoadError, REMEDY)
    tensors = {name: found[name][...] for name in wanted}
    check_finite(tensors, source, ModelLoadError, REMEDY)
    form = "DFlash" if is_block(settings) else config.kind
    if SPECULATORS in settings.values:
        form = "speculators"
    return StoredHead(config, tensors, d2t, fingerprint, form=form)


def _renamed(stored: Mapping[str, Slice], source: str) -> dict[str, Slice]:
    """Return the tensors of an EAGLE-3 head by the names of `EagleConfig.tensors`."""
    found: dict[str, Slice] = {}
    for name, each in stored.items():
        own_name = re.sub(r"^layers\.0\.", "midlayer.", name)
        if own_name in found:
            raise ModelLoadError(f"{source}: the tensor {name} is there under two names. {REMEDY}")
        found[own_name] = each
    return found


def _is_eagle_3(settings: Fields, found: Mapping[str, Slice]) -> bool:
    """Return whether anything is present that only EAGLE-3 heads have: a damaged one must not pass for EAGLE-1."""
    named = settings.list_of("architectures", str, [])
    named_tokens = SPECULATORS in settings.values or "draft_vocab_size" in settings.values or D2T in found
    has = any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in found)
    return named_tokens or has or any("Eagle3" in name for name in named)


def _fingerprint(embedding: Slice | None, config: EagleConfig | BlockConfig, source: str) -> str:
    if embedding is None:
        return ""
    shape = (config.vocab_size, config.target_hidden_size)
    check_shape(EMBEDDING, embedding, shape, source, ModelLoadError, REMEDY)

    def rows(ids: Tensor) -> Tensor:
        return torch.cat([embedding[index : index + 1] for index in ids.tolist()]).float()

    return embedding_fingerprint(rows, *shape)


def _check_mask(mask: Tensor | None, d2t: Tensor | None, config: EagleConfig | BlockConfig, source: str) -> None:
    """Compare t2d, [vocab_size] bool, with the tokens that d2t leads to."""
    if mask is None:
        return
    size = config.draft_vocab_size
    named_tokens = torch.arange(size) if d2t is None else (torch.arange(size) + d2t).sort().values
    if list(mask.shape) != [config.vocab_size] or not torch.equal(mask.bool().nonzero().flatten(), named_tokens):
        raise ModelLoadError(f"{source}: t2d and d2t do not name the same tokens of the target. {REMEDY}")
