"""What the configuration of every kind of head tells, and the checks that several kinds share."""

from __future__ import annotations

from dataclasses import Field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

from forerun.errors import ConfigError


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


def check_positive(of: str, **sizes: int) -> None:
    """Raises ConfigError where a size is below 1. of: what has these sizes."""
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} of {of} is {value}, but must be 1 or more.")


def check_vocabulary(draft_vocab_size: int, vocab_size: int, has: str = "the head has", its: str = "its") -> None:
    """Raises ConfigError where there are more output tokens than the target has. has, its: the message's words."""
    if draft_vocab_size > vocab_size:
        raise ConfigError(f"{has} {draft_vocab_size:,} output tokens, but {its} target only {vocab_size:,}.")


def check_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ConfigError where heads cannot share keys, or not be rotated."""
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"the head has {num_heads} query heads, {num_kv_heads} key heads and a head_dim of {head_dim}: the first "
            "must be a multiple of the second, and head_dim even."
        )


def check_layers(layers: tuple[int, ...]) -> None:
    """Raises ConfigError where the target's layers that are read do not rise, or there are none."""
    if not layers or any(a >= b for a, b in pairwise(layers)):
        raise ConfigError(f"layers of the head are {list(layers)}, but must rise, and there must be one.")
