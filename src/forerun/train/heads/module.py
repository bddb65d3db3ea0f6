"""The base of the modules that training computes heads with: tensors, augmentation, layers, and rows of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.heads.config import HeadConfig
from forerun.errors import ConfigError
from forerun.train.accelerator import SHAPE_STEP, copy_to_device
from forerun.train.data.packed import NO_DOCUMENT


class HeadModule(nn.Module):
    """The trained tensors of a head of any kind, float32, under their names; NaN until they are set."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config: HeadConfig = config
        for name, shape in config.tensors().items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.full(shape, float("nan"))))

    def check(self) -> None:
        """Raise ConfigError where a tensor holds NaN or infinity."""
        for name, parameter in self.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ConfigError(f"{name} of the head holds NaN or infinity: it was never set, or training failed.")


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Noise and dropout of the target's normalised states.

    Attributes:
        seed: of the draws.
    """

    dropout: float
    noise: float
    seed: int

    def __call__(self, states: Tensor) -> Tensor:
        """Return states [R, S] with noise and dropout."""
        generator = torch.Generator(states.device).manual_seed(self.seed)
        # one draw decides both, since drawing takes as long as a product
        drawn = torch.rand(states.shape, generator=generator, device=states.device)
        kept = drawn >= self.dropout
        # uniform again among what is kept
        noise = (2 * (drawn - self.dropout) / (1 - self.dropout) - 1).mul_(self.noise)
        return (states + noise) * kept / (1 - self.dropout)


Shape = TypeVar("Shape", BlockConfig, EagleConfig)


class HeadLayer(Generic[Shape]):
    """The base of layers that read the target's states: weights by short names, matrices in the type of products.

    Args:
        rows: that the layer is computed of.
        prefix: left out of the names.
        kept: prefix of the names of matrices that no product is made with; they keep their type.
    """

    def __init__(
        self,
        head: nn.Module,
        config: Shape,
        dtype: torch.dtype,
        rows: HeadRows,
        *,
        prefix: str = "",
        kept: str | None = None,
    ) -> None:
        self.config: Shape = config
        self.rows = rows
        self.weights = {
            name.removeprefix(prefix).removesuffix(".weight"): (
                weight if weight.ndim != 2 or (kept is not None and name.startswith(kept)) else weight.to(dtype)
            )
            for name, weight in head.named_parameters()
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        return product(x, self.weights[name])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name].to(x.dtype), self.config.rms_norm_eps)

    def joined(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """Join states [R, layers, H] to [R, layers * H], which is fused. There may be one layer more."""
        states = states[:, : len(self.config.layers)]
        if self.config.norm_before_fc:
            parts = [self.norm(f"fc_norm.{index}", states[:, index]) for index in range(states.shape[1])]
            states = torch.stack(parts, 1)
        flat = states.flatten(1)
        return flat if augment is None else augment(flat)

    def feed_forward(self, x: Tensor, prefix: str = "") -> Tensor:
        """Add the output of the gated feed-forward part to x."""
        h = self.norm(f"{prefix}post_attention_layernorm", x)
        h = F.silu(self.linear(f"{prefix}mlp.gate_proj", h)) * self.linear(f"{prefix}mlp.up_proj", h)
        return x + self.linear(f"{prefix}mlp.down_proj", h)


def context_mask(rows: HeadRows, segment: DocumentRows, ahead: int, window: int | None, like: Tensor) -> Tensor:
    """Return [a, r]: 0 where an active row of a document attends to one of its rows, minus infinity elsewhere.

    Args:
        ahead: positions from an active row to the query, which count in a sliding window.
        window: positions that are attended to; None for all.
        like: gives the type.
    """
    last = rows.active[segment.first_active : segment.last_active, None] - segment.first
    columns = torch.arange(segment.last - segment.first, device=last.device)
    hidden = columns > last
    if window is not None:
        hidden |= last + ahead - columns >= window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=last.device).masked_fill_(hidden, -torch.inf)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [..., in] to [..., out] in the weight's type, and return x's type; rows are padded to SHAPE_STEP."""
    flat = x.flatten(0, -2)
    padded = F.pad(flat.to(weight.dtype), (0, 0, 0, -len(flat) % SHAPE_STEP))
    return F.linear(padded, weight)[: len(flat)].to(x.dtype).view(*x.shape[:-1], -1)


def rotated(x: Tensor, positions: Tensor, rope_theta: float) -> Tensor:
    """Rotate the halves of x, [..., heads, head_dim], by angles of float32, as inference does."""
    half = x.shape[-1] // 2
    powers = torch.arange(0, 2 * half, 2, dtype=torch.float32, device=x.device) / (2 * half)
    angles = positions[..., None].float() / rope_theta**powers
    cosines, sines = (part.to(x.dtype)[..., None, :] for part in (angles.cos(), angles.sin()))
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """The rows of one document.

    Attributes:
        first, last: of all rows, the document's.
        first_active, last_active: the same of the active rows.
    """

    first: int
    last: int
    first_active: int
    last_active: int


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Index arrays of some packed rows. "Offsets" are positions in the documents' tokens, laid one after another.

    Attributes:
        token_ids: [N] int64, the documents' tokens.
        lengths: of the documents.
        states: [R] offsets whose state a row reads; the token that it reads first is at the next offset.
        positions: [R] the row's position in its document.
        active: [A] the rows that predict a wanted token.
        tokens: [J, A] offsets of the tokens that the active rows read at each step.
        predictors: [W] offsets from whose state the target predicts the wanted tokens; each is there once.
        rows: [J, W] the active row that predicts the same token at step j; 0 where there is none.
        valid: [J, W] bool, whether there is one.
        segments: the documents that have active rows.
    """

    token_ids: Tensor
    lengths: list[int]
    states: Tensor
    positions: Tensor
    active: Tensor
    tokens: Tensor
    predictors: Tensor
    rows: Tensor
    valid: Tensor
    segments: list[DocumentRows]

    @property
    def steps(self) -> int:
        """Return the number of unrolled steps."""
        return len(self.tokens)

    def to(self, where: torch.device) -> HeadRows:
        """Return the rows with their tensors on a device."""
        return HeadRows(
            token_ids=copy_to_device(self.token_ids, where),
            lengths=self.lengths,
            states=copy_to_device(self.states, where),
            positions=copy_to_device(self.positions, where),
            active=copy_to_device(self.active, where),
            tokens=copy_to_device(self.tokens, where),
            predictors=copy_to_device(self.predictors, where),
            rows=copy_to_device(self.rows, where),
            valid=copy_to_device(self.valid, where),
            segments=self.segments,
        )


def head_rows(tokens: Tensor, wanted: Tensor, documents: Tensor, steps: int) -> HeadRows:
    """Lay out the documents of packed rows, each [rows, window + 1], on the CPU."""
    used = documents != NO_DOCUMENT
    token_ids = tokens[used].long()
    is_wanted = wanted[used]
    lengths = document_lengths(documents, used)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    sizes = torch.tensor(lengths)
    offset = torch.arange(len(token_ids))
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    position = offset - starts[document]
    left = sizes[document] - position  # tokens from this offset to the end of its document, itself included
    # the row of an offset predicts the token two further on, and later ones at later steps
    is_row = left > 2
    is_active = torch.zeros_like(is_row)
    for step in range(steps):
        is_active |= (left > 2 + step) & is_wanted[(offset + 2 + step).clamp(max=len(offset) - 1)]
    states = offset[is_row]
    active = is_active[is_row].nonzero().flatten()
    number = torch.full_like(offset, -1)  # of the active row at an offset
    number[states[active]] = torch.arange(len(active))
    read = states[active][None] + 1 + torch.arange(steps)[:, None]
    predictors = offset[(left > 1) & is_wanted[(offset + 1).clamp(max=len(offset) - 1)] & (position > 0)]
    source = predictors[None] - 1 - torch.arange(steps)[:, None]
    valid = (position[predictors][None] > torch.arange(steps)[:, None]) & (source >= 0)
    rows = number[source.clamp(min=0)]
    return HeadRows(
        token_ids=token_ids,
        lengths=lengths,
        states=states,
        positions=position[is_row],
        active=active,
        tokens=read.clamp(max=len(offset) - 1),
        predictors=predictors,
        rows=torch.where(valid, rows, 0),
        valid=valid,
        segments=_segments(document[is_row], document[is_row][active], len(lengths)),
    )


def predicted(rows: HeadRows) -> Tensor:
    """Return [A, J] bool: whether the token that an active row predicts at a step is wanted."""
    found = torch.zeros(rows.steps, len(rows.active), dtype=torch.bool, device=rows.rows.device)
    for step in range(rows.steps):
        found[step, rows.rows[step, rows.valid[step]]] = True
    return found.T


def document_lengths(documents: Tensor, used: Tensor) -> list[int]:
    """Return the lengths of the documents of each row, in order."""
    row = torch.arange(len(documents))[:, None].expand_as(documents)[used]
    key = row * (int(documents.max()) + 2) + documents[used]
    lengths: list[int] = torch.unique_consecutive(key, return_counts=True)[1].tolist()
    return lengths


def _segments(of_rows: Tensor, of_active: Tensor, count: int) -> list[DocumentRows]:
    ends = torch.bincount(of_rows, minlength=count).cumsum(0).tolist()
    active_ends = torch.bincount(of_active, minlength=count).cumsum(0).tolist()
    bounds = zip([0, *ends], ends, [0, *active_ends], active_ends, strict=False)
    return [DocumentRows(*each) for each in bounds if each[3] > each[2]]
