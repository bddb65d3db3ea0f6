"""Fingerprints of the target that a head was trained for, which are independent of the number format.

A head reads its target's hidden states, so it fits one set of weights. The same weights come in many forms: safetensors
in bfloat16 or float32, GGUF with blocks of 4 to 8 bits, weights quantized at load. Bytes differ between these, names of
files and of tensors too, and a tokenizer is shared by many models. What they have in common: the sizes (vocabulary,
width, number of weights, which reveals a pruned copy), and nearly all signs of the weights. So a fingerprint is the
sizes and the signs of fixed entries of the embedding and of the output layer, which are compared bit by bit. A file may
hold a tied embedding twice, in two formats: such a copy is not counted.

Rounding changes the sign of an entry near zero alone: about 0.5 % of them at 8 bits, 3 % at 4 bits. Models that were
trained from different starts agree in half of them. `MAX_DIFFERENT` lies between. A model that was trained a little
further, or has an adapter merged, has nearly all its signs left and passes: its states are about those that the head
was trained on, and a draft that is wrong costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import IncompatibleDrafterError

MAX_DIFFERENT = 0.15
"""Share of the signs that may differ between two forms of the same weights."""
_ROWS = 64
_ENTRIES = 4
_STEP_OF_ROW, _STEP_OF_ENTRY = 37, 101
"""Primes; entry (i * 37 + j * 101) mod width of the i-th row is looked at."""


class FingerprintedTarget(Protocol):
    """The part of a `LanguageModel` that a fingerprint is computed from."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def embedding_rows(self, token_ids: Tensor) -> Tensor: ...

    def output_rows(self, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The parts of a fingerprint; its text is "VOCABULARY-WIDTH-PARAMETERS-EMBEDDING-OUTPUT".

    Attributes:
        vocab_size, hidden_size: of the target.
        num_parameters: of its weights; 0 if unknown, which equals every number.
        embedding, output: signs of the layers' entries in hexadecimal; empty if unknown.
    """

    vocab_size: int
    hidden_size: int
    num_parameters: int = 0
    embedding: str = ""
    output: str = ""

    def __str__(self) -> str:
        parts = (self.vocab_size, self.hidden_size, self.num_parameters, self.embedding, self.output)
        return "-".join(map(str, parts))

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """Return the parts of a text; None if it is not a fingerprint."""
        parts = text.split("-")
        if len(parts) != 5 or not all(part.isdecimal() and len(part) < 20 for part in parts[:3]):
            return None
        if any(part and (len(part) != _ROWS * _ENTRIES // 4 or not set(part) <= _HEX) for part in parts[3:]):
            return None
        return cls(int(parts[0]), int(parts[1]), int(parts[2]), parts[3], parts[4])

    @property
    def is_tied(self) -> bool:
        """Return whether the output layer is known to be the embedding, perhaps in another number format."""
        is_known = bool(self.embedding and self.output)
        return is_known and _share_different(self.embedding, self.output) <= MAX_DIFFERENT

    def difference(self, other: Fingerprint) -> str:
        """Describe in which part two fingerprints differ; empty for one target."""
        sizes = {
            "tokens": (self.vocab_size, other.vocab_size),
            "wide": (self.hidden_size, other.hidden_size),
            "weights": (self.num_parameters, other.num_parameters),
        }
        copy = self.vocab_size * self.hidden_size
        for what, (one, two) in sizes.items():
            if what == "weights" and abs(one - two) == copy and self.is_tied and other.is_tied:
                continue  # one of the files holds the embedding a second time, as its output layer
            if one != two and one and two:
                return f"{one:,} {what}, not {two:,}"
        for what, one_bits, two_bits in (
            ("embedding", self.embedding, other.embedding),
            ("output layer", self.output, other.output),
        ):
            share = _share_different(one_bits, two_bits)
            if share > MAX_DIFFERENT:
                return f"{share:.0%} of the signs of its {what} are others"
        return ""


_HEX = frozenset("0123456789abcdef")


def target_fingerprint(target: FingerprintedTarget) -> str:
    """Compute the fingerprint of a model's weights, in any number format. Compare two by `same_target`, never as texts.

    Raises:
        UnsupportedModelError: the model has no embeddings that can be read.
    """
    ids = sampled_ids(target.vocab_size)
    embedding = target.embedding_rows(ids)
    output = target.output_rows(ids)
    return str(
        Fingerprint(
            target.vocab_size,
            embedding.shape[1],
            target.num_parameters,
            sampled_signs(embedding),
            sampled_signs(output),
        )
    )


def embedding_fingerprint(rows: Callable[[Tensor], Tensor], vocab_size: int, hidden_size: int) -> str:
    """Compute the fingerprint of a target of which only the embedding is available. rows: token ids -> [n,
    hidden_size]."""
    return str(Fingerprint(vocab_size, hidden_size, embedding=sampled_signs(rows(sampled_ids(vocab_size)))))


def same_target(one: str, two: str) -> bool:
    """Return whether two fingerprints are of one target. Invalid texts match nothing."""
    first = Fingerprint.parse(one)
    second = Fingerprint.parse(two)
    return first is not None and second is not None and not first.difference(second)


def check_target(fingerprint: str, target: FingerprintedTarget, what: str) -> None:
    """Refuse a head whose fingerprint is that of another target. One without a fingerprint passes.

    Args:
        what: the head, for messages.

    Raises:
        IncompatibleDrafterError: names the difference.
    """
    if not fingerprint:
        return
    stored = Fingerprint.parse(fingerprint)
    found = Fingerprint.parse(target_fingerprint(target))
    assert found is not None
    reason = "its fingerprint cannot be read" if stored is None else stored.difference(found)
    if reason:
        raise IncompatibleDrafterError(
            f"{what} was trained for another target than {target.name}: {reason}. Give the target that it was trained "
            "for, or train a head for this one: forerun train eagle."
        )


def sampled_ids(vocab_size: int) -> Tensor:
    """Return [64] int64: tokens, evenly spread over the vocabulary, whose rows are compared."""
    return torch.arange(_ROWS) * vocab_size // _ROWS


def sampled_signs(rows: Tensor) -> str:
    """Return whether entries of the rows are above zero, 256 bits in hexadecimal. rows: [64, hidden]."""
    first = torch.arange(_ROWS)[:, None] * _STEP_OF_ROW
    entries = (first + torch.arange(_ENTRIES) * _STEP_OF_ENTRY) % rows.shape[1]
    bits = (rows.cpu().gather(1, entries) > 0).flatten().tolist()
    number = int("".join("01"[bit] for bit in bits), 2)
    return f"{number:0{len(bits) // 4}x}"


def _share_different(one: str, two: str) -> float:
    """Return the share of the bits that differ; 0 if one side is unknown."""
    if not one or not two:
        return 0.0
    return (int(one, 16) ^ int(two, 16)).bit_count() / (4 * len(one))
