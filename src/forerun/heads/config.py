"""What the configuration of every kind of head tells."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, NamedTuple, Protocol


class KeyShape(NamedTuple):
    """Keys, and values as wide, that a head keeps of a row; 0 layers of a head that keeps none."""

    num_layers: int
    num_heads: int
    head_dim: int


class HeadConfig(Protocol):
    """The shape of a head, as a frozen data class.

    Attributes:
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; vocab_size for all of them.
        target_hidden_size: of the target's states and embeddings.
        layers: of the target, whose entering states are read, rising; the number of its layers stands for the state
            after its final norm.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def kind(self) -> str:
        """What it is called, such as "EAGLE-3"."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def target_hidden_size(self) -> int: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def keys(self) -> KeyShape:
        """What its cache holds."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor by name, with its shape. `d2t`, which is not trained, is stored beside them where the
        draft vocabulary is smaller than the target's."""

    def extras(self) -> list[str]:
        """What it has that not every head of its kind has, for people."""
