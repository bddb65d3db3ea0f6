"""A head as a folder holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.heads.eagle_config import EagleConfig
from forerun.heads.kinds import HeadConfig
from forerun.kernels.quantised_weight import QuantisedWeight


@dataclass(frozen=True, slots=True, eq=False)
class StoredHead:
    """A head that was read, every name, shape and number checked.

    Attributes:
        config: its shape.
        tensors: all of `head_tensors(config)`; those in codes are dequantised, float32.
        d2t: [draft_vocab_size] int64: the target's id of draft token i is i + d2t[i]. None where they are the same.
        fingerprint: of the target that it was trained for (`target_fingerprint`); empty where that is not told.
        record: what was written beside it: how it was trained, as JSON.
        number_format: of the target's weights when it was trained, such as "bfloat16"; empty where that is not told.
        codes: the matrices that are kept at 8 bits, by name.
        form: "forerun", "EAGLE-1", "EAGLE-3" or "speculators".
    """

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    d2t: Tensor | None = None
    fingerprint: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    number_format: str = ""
    codes: Mapping[str, QuantisedWeight] = field(default_factory=dict)
    form: str = "forerun"

    @property
    def nbytes(self) -> int:
        """Of its tensors as they are kept."""
        kept = [tensor for name, tensor in self.tensors.items() if name not in self.codes]
        in_codes = sum(weight.codes.nbytes + weight.scale.nbytes for weight in self.codes.values())
        return in_codes + sum(tensor.nbytes for tensor in kept) + (0 if self.d2t is None else self.d2t.nbytes)

    def summary(self) -> dict[str, str]:
        """What it is, in a few words each, for people."""
        config = self.config
        formats = {str(tensor.dtype).removeprefix("torch.") for name, tensor in self.tensors.items()}
        kept = "int8" if self.codes else "/".join(sorted(formats))
        kind, extras = _described(config)
        extras |= {
            "norms of states": config.norm_before_fc,
            "output rows of its own": config.own_output_rows,
            f"window of {config.sliding_window or 0:,}": config.sliding_window is not None,
        }
        has = ", ".join(name for name, holds in extras.items() if holds)
        return {
            "head": f"{kind}, form {self.form}, {kept}, {self.nbytes:,} bytes" + (f"; {has}" * bool(has)),
            "reads": f"states of layers {', '.join(map(str, config.layers))}, {config.target_hidden_size:,} wide",
            "proposes": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
            "target": " ".join(each for each in (self.number_format, self.fingerprint) if each) or "not told",
        }


def _described(config: HeadConfig) -> tuple[str, dict[str, bool]]:
    """The kind of head in a few words, and what it may have beside what all have."""
    if isinstance(config, EagleConfig):
        return f"EAGLE-{config.version}", {
            "normed output": config.norm_output,
            "residual of the embedding": config.embedding_residual,
        }
    return f"block of {config.block_size} tokens in {config.num_layers} layers", {
        f"Markov bias of rank {config.markov_rank}": config.markov_rank > 0,
        "confidence": config.confidence,
        "drafts from the anchor": config.sample_from_anchor,
    }
