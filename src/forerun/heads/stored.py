"""A head as a folder holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from forerun.errors import UnsupportedModelError
from forerun.heads.config import HeadConfig
from forerun.kernels.quantised_weight import QuantisedWeight

Kind = TypeVar("Kind", bound=HeadConfig, covariant=True)
Other = TypeVar("Other", bound=HeadConfig)


@dataclass(frozen=True, slots=True, eq=False)
class StoredHead(Generic[Kind]):
    """A head that was read, every name, shape and number checked.

    Attributes:
        config: its shape.
        tensors: all of `config.tensors()`; those in codes are dequantised, float32.
        d2t: [draft_vocab_size] int64: the target's id of draft token i is i + d2t[i]. None where they are the same.
        fingerprint: of the target that it was trained for (`target_fingerprint`); empty where that is not told.
        record: what was written beside it: how it was trained, as JSON.
        number_format: of the target's weights when it was trained, such as "bfloat16"; empty where that is not told.
        codes: the matrices that are kept at 8 bits, by name.
        form: "forerun", or that of a public head: "EAGLE-1", "EAGLE-3", "speculators" or "Medusa".
    """

    config: Kind
    tensors: Mapping[str, Tensor]
    d2t: Tensor | None = None
    fingerprint: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    number_format: str = ""
    codes: Mapping[str, QuantisedWeight] = field(default_factory=dict)
    form: str = "forerun"

    @property
    def token_ids(self) -> Tensor:
        """[draft_vocab_size] int64, the target's tokens that it can propose."""
        tokens = torch.arange(self.config.draft_vocab_size)
        return tokens if self.d2t is None else tokens + self.d2t

    @property
    def nbytes(self) -> int:
        """Of its tensors as they are kept."""
        kept = [tensor for name, tensor in self.tensors.items() if name not in self.codes]
        in_codes = sum(weight.codes.nbytes + weight.scale.nbytes for weight in self.codes.values())
        return in_codes + sum(tensor.nbytes for tensor in kept) + (0 if self.d2t is None else self.d2t.nbytes)

    def of(self, kind: type[Other], place: str, drafters: str) -> StoredHead[Other]:
        """This head, which is of that kind.

        Args:
            place: where it lies, for messages. drafters: that draft with heads of that kind.

        Raises:
            UnsupportedModelError: it is of another.
        """
        if not isinstance(self.config, kind):
            raise UnsupportedModelError(
                f"{place} holds a head of the kind {self.config.kind}, which is not what {drafters} is for. Give a "
                "head of another kind, or the drafter that this one is for (forerun drafters)."
            )
        return cast("StoredHead[Other]", self)

    def summary(self) -> dict[str, str]:
        """What it is, in a few words each, for people."""
        config = self.config
        formats = {str(tensor.dtype).removeprefix("torch.") for name, tensor in self.tensors.items()}
        kept = "int8" if self.codes else "/".join(sorted(formats))
        has = ", ".join(config.extras())
        return {
            "head": f"{config.kind}, form {self.form}, {kept}, {self.nbytes:,} bytes" + (f"; {has}" * bool(has)),
            "reads": f"states of layers {', '.join(map(str, config.layers))}, {config.target_hidden_size:,} wide",
            "proposes": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
            "target": " ".join(each for each in (self.number_format, self.fingerprint) if each) or "not told",
        }
