"""The memory that a draft head will take beside its target, before its tensors are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.drafters.models.head_files.folder import HeadHeader, float_type, head_header
from forerun.drafters.models.mtp.checkpoint_format import find_mtp
from forerun.kernels.partition import AttentionShape
from forerun.models.attention.base import LayerAttention, Planner
from forerun.models.attention.native import PathPlanner
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.decoders import served_kind
from forerun.models.loading.source import find_source
from forerun.models.memory_plan import ModelMemory, other_nbytes
from forerun.models.weight_plan import WeightPlan, library_for


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """The memory that one head takes, with the fields of `ModelMemory`.

    Attributes:
        weights: bytes of its layers, of the target's output rows that it has a copy of, and of its tensors as they were
            read, which are kept.
        page_nbytes: 0 of a head that keeps nothing of a sequence.
    """

    name: str
    number_format: str
    device: torch.device
    weights: int
    loading: int
    page_nbytes: int


def head_memory(folder: Path, target: ModelMemory, target_name: str | Path) -> HeadMemory:
    """Estimate the memory of a head, which computes in the target's number format. Only the tensors' header is read.

    Args:
        folder: of the head; the target's name for the one that its checkpoint carries.
        target_name: that the target is loaded by.

    Raises:
        ModelLoadError, UnsupportedModelError: as `load_head`, as far as the header shows.
    """
    if is_carried := str(folder) == str(target_name):
        carried = find_mtp(target_name)
        header = HeadHeader(carried.config, float_type(carried.slices.values()), is_quantized=False)
    else:
        header = head_header(folder, find_source(target_name).config().get_text_config().num_hidden_layers)
    is_number = target.number_format == str(target.dtype).removeprefix("torch.")
    plan = WeightPlan.of_head(
        *(target.dtype, target.device, library_for(target.device, target.dtype)),
        None if is_number else target.number_format,
        is_quantized=header.is_quantized,
    )
    layers = _layers_nbytes(header, plan, may_share=_gives_output(target_name))
    form = plan.form("")
    return HeadMemory(
        name=f"the MTP layer of {target_name}" if is_carried else str(folder),
        number_format=target.number_format if isinstance(form, torch.dtype) else f"int{form.bits}",
        device=target.device,
        weights=layers + header.nbytes,
        loading=layers + 2 * header.nbytes,  # the file and what is made of it
        page_nbytes=_page_nbytes(header, target),
    )


def _gives_output(target_name: str | Path) -> bool:
    """Return whether heads can compute with the output layer of a target, where the native kernels compute it."""
    source = find_source(target_name)
    config = source.plain_config()
    _, spec = served_kind("auto", source, config)
    return spec is not None and not spec.output.has_bias


def _layers_nbytes(header: HeadHeader, plan: WeightPlan, *, may_share: bool) -> int:
    """Return the bytes of the layers that compute, vectors in float32 at least. may_share: as of `_gives_output`."""
    config = header.config
    shapes = config.tensors()
    nbytes = 0
    for name, shape in shapes.items():
        if len(shape) == 2:
            nbytes += plan.product([[name]], shape[:1], shape[1]).nbytes
        else:
            nbytes += other_nbytes(torch.empty(shape, dtype=header.dtype, device="meta"), plan)
    is_shared = may_share and plan.library is not None and config.draft_vocab_size == config.vocab_size
    if not is_shared and not any(name.startswith("lm_head") for name in shapes):
        (form,) = plan.forms([plan.target_rows])
        nbytes += plan.nbytes(form, (config.draft_vocab_size, config.target_hidden_size))
    return nbytes


def _page_nbytes(header: HeadHeader, target: ModelMemory) -> int:
    keys = header.config.keys
    if not keys.num_layers:
        return 0
    layer = LayerAttention(keys.num_heads, 1, keys.key_width, keys.value_width, AttentionShape(1.0))
    layers = [layer] * keys.num_layers
    library = library_for(target.device, target.dtype)
    planner: Planner
    if library is None:
        planner = ReferenceAttention(target.dtype).planner(layers, target.device)
    else:
        planner = PathPlanner(layers, target.dtype)
    return planner.pool.page_nbytes
