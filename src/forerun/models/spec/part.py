"""What all parts of a layer have: linear layers and norms, by role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a layer.

    Attributes:
        modules: role -> the module of the layer, of each linear layer and norm that there is. Roles that name the same
            module have its outputs one after another.
        biases: roles of linear layers with a bias.
        ROLES, NORMS: those that there may be, in order.
    """

    ROLES: ClassVar[tuple[str, ...]] = ()
    NORMS: ClassVar[tuple[str, ...]] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    biases: frozenset[str] = frozenset()

    @property
    def roles(self) -> list[str]:
        """Return its linear layers."""
        return [role for role in self.ROLES if role in self.modules]

    @property
    def norms(self) -> list[str]:
        """Return its norms."""
        return [role for role in self.NORMS if role in self.modules]

    def module(self, role: str, expert: int = 0) -> str:
        """Return the module of a role. expert: whose, where several experts have one each."""
        return self.modules[role]

    def sharing(self, role: str) -> list[str]:
        """Return the roles whose outputs a role's module has, in order."""
        return [each for each in self.roles if self.modules[each] == self.modules[role]]

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer; 0: as many as the residual has."""
        raise NotImplementedError

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer; 0: as many as the residual has."""
        raise NotImplementedError

    def norm_width(self, role: str) -> int:
        """Return the numbers that a norm is over; 0: as many as the residual has."""
        return 0

    def rows(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the rows of the module's weight that are a role's, int64; None for all in order.

        in_pairs: numbers of queries and keys that are rotated together are to be side by side; else half of what is
            rotated apart. What is rotated comes first.
        """
        return None

    def norm_order(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the order of the weights of a norm, as `rows`."""
        return None
