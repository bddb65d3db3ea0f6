"""Names of tensors and modules in containers, brought to those of the text model that they hold.

A container is a model with parts beside its text model, such as one that sees: Transformers' classes of the name
`...ForConditionalGeneration`. Publishers and versions of Transformers put the text model in different places of it.
Transformers' `conversion_mapping.py` knows them by the container's class, which is never made here: its renamings of
text are prefixes, which are taken off without importing it (`tests/unit/models/test_containers.py` compares them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from torch import Tensor

from forerun.models.loading.weights import TensorSlice

_PLACE = re.compile(
    r"(?:thinker\.)?(?:model\.)?(?:language_model|text_model)\.(?:model\.)*"
    r"|thinker\.model\.(?=(?:layers|embed_tokens|norm)\.)|thinker\.(?=lm_head\b)"
)
"""Where a text model lies in a container, up to its layers or its output layer."""
_OUTER = re.compile(r"(?:lm_head|backbone|transformer)\b")
"""Parts of a text model beside its base."""
_TEXT = re.compile(r"(?:model\.(?:layers|embed_tokens|norm)|lm_head|mtp)\.")
"""Names of a text model's that need no other: those of a container whose parts lie beside the text model's."""
_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def text_name(name: str) -> str:
    """Return the name in the text model of a tensor, of what belongs to one such as its scale, or of a module; the name
    itself where it is no other."""
    found = _PLACE.match(name)
    if found is None:
        return name
    own = name[found.end() :]
    return own if _OUTER.match(own) else f"model.{own}"


def text_names(names: Iterable[str], *, is_container: bool) -> dict[str, str]:
    """Return how the text model calls tensors or modules of these names; of a container's, those of its other parts
    are left out."""
    named = {name: text_name(name) for name in names}
    return {name: own for name, own in named.items() if not is_container or own != name or _TEXT.match(name)}


@dataclass(frozen=True, slots=True)
class _Turned:
    """A stack of matrices whose last two dimensions the files have in the other order."""

    stack: TensorSlice

    def get_shape(self) -> list[int]:
        count, size_in, size_out = self.stack.get_shape()
        return [count, size_out, size_in]

    def get_dtype(self) -> str:
        return self.stack.get_dtype()

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        return self.stack[index].transpose(-1, -2).contiguous()


def turned(slices: dict[str, TensorSlice], config: Any) -> dict[str, TensorSlice]:
    """Return the tensors of a container of the type qwen3_vl_moe with experts as its text model has them, [count, out,
    in]: publishers have them as [count, in, out], and Transformers saves them either way.

    config: of the text model.
    """
    hidden = config.hidden_size
    width = config.moe_intermediate_size
    published = {_STACKS[0]: [hidden, 2 * width], _STACKS[1]: [width, hidden]}
    stacks = {name: each for name, each in slices.items() if name.endswith(_STACKS)}
    shapes = {name[name.index("mlp") :]: each.get_shape()[1:] for name, each in stacks.items()}
    if not any(shape == published[leaf] != shape[::-1] for leaf, shape in shapes.items()):  # one of them is no square
        return slices
    return {**slices, **{name: _Turned(each) for name, each in stacks.items()}}
