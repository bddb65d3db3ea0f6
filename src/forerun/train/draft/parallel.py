"""Rows from which a draft model learns to draft several tokens in one forward, with mask tokens (PARD, 2504.18583).

Behind the tokens of a packed row come mask tokens. Those of a start s, the position of the last token that is known,
stand at the positions s + 1, s + 2, ..., see the tokens up to s and the mask tokens before them, and each predicts the
token after its position, as the model will be fed when it drafts (`drafters/growth/parallel.py`). So a row holds one
task for every number of mask tokens. Of each further one there are fewer: a random part of the starts drops out
(conditional drop-token), since a mask token needs those before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ConfigError
from forerun.models.decoders import llama_refusal
from forerun.models.loading.configuration import MASK_TOKEN
from forerun.train.accelerator import model_vocabulary
from forerun.train.data.packed import PackedShard, token_counts

KEPT = 0.7
"""Share of the starts that have another mask token, of those that have one less."""
LEAST_KEPT = 0.2
"""Share of all starts that have another, at least."""


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """Packed rows with mask tokens behind them, N positions in all.

    Attributes:
        starts: int64 [B, N], of mask tokens the position of the last token that is known, of others their own.
        depths: int64 [N], which of the mask tokens of its start it is, from 1; 0 for tokens.
    """

    starts: Tensor
    depths: Tensor

    @classmethod
    def whole(cls, tokens: Tensor, first: int, num_tokens: int) -> MaskLayout:
        """Return that of chains of so many tokens from every start of tokens [B, T], from `first` on."""
        rows, width = tokens.shape
        every = torch.arange(width, device=tokens.device)
        starts = torch.cat([every, every[first:].repeat(num_tokens - 1)])
        more = torch.arange(1, num_tokens, device=tokens.device).repeat_interleave(width - first)
        return cls(starts.expand(rows, -1), torch.cat([torch.zeros_like(every), more]))

    @classmethod
    def drawn(cls, wanted: Tensor, num_tokens: int, seed: int) -> MaskLayout:
        """Draw starts, first those before wanted tokens, of which each has as many mask tokens as it is drawn for.

        Args:
            wanted: bool [B, T], whether the prediction at each position is learnt.
            num_tokens: of the longest chain, 2 at least.
        """
        rows, width = wanted.shape
        keys = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)).to(wanted.device)
        order = (keys + ~wanted).argsort(1)
        counts = [max(1, int(width * max(KEPT**depth, LEAST_KEPT))) for depth in range(1, num_tokens)]
        tokens = torch.arange(width, device=wanted.device)
        starts = torch.cat([tokens.expand(rows, -1), *(order[:, :count] for count in counts)], 1)
        depths = torch.tensor([0, *range(1, num_tokens)]).repeat_interleave(torch.tensor([width, *counts]))
        return cls(starts, depths.to(wanted.device))

    def at(self, values: Tensor) -> Tensor:
        """Return what values [B, T, ...] have at each position, [B, N, ...]; at those behind the end, the last ones."""
        places = (self.starts + self.depths).clamp(max=values.shape[1] - 1)
        return values[torch.arange(len(values), device=values.device)[:, None], places]

    def is_within(self, documents: Tensor) -> Tensor:
        """Return [B, N] whether a position lies in its start's document. documents: [B, T]."""
        ends = self.starts + self.depths >= documents.shape[1]
        return ~ends & (self.at(documents) == documents.gather(1, self.starts))

    def inputs(self, tokens: Tensor, documents: Tensor, mask_token: int) -> dict[str, Tensor]:
        """Return what the model is fed. tokens: int64 [B, T]. documents: [B, T]."""
        is_token = self.depths == 0
        starts = self.starts
        document = documents.gather(1, starts)
        before = is_token & (starts[:, None, :] <= starts[:, :, None]) & (document[:, None, :] == document[:, :, None])
        own = ~is_token & (self.depths <= self.depths[:, None]) & (starts[:, None, :] == starts[:, :, None])
        return {
            "input_ids": self.at(tokens).where(is_token, mask_token),
            "position_ids": starts + self.depths,
            "attention_mask": (before | own)[:, None],
        }


def mask_token_of(model: PreTrainedModel) -> int | None:
    """Return the token that a draft reads in place of tokens that are not known yet; None if it drafts one by one."""
    found: int | None = vars(model.config).get(MASK_TOKEN)
    return found


def check_family(model: PreTrainedModel, what: str, option: str) -> None:
    """Raise ConfigError if a draft is not of the Llama family, which alone has something. what: with its verb."""
    refusal = llama_refusal(model.config)
    if refusal is not None:
        raise ConfigError(
            f"{what} for the Llama family alone, and this draft is not of it: {refusal}. Leave {option} out."
        )


def set_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: PackedShard) -> None:
    """Set in the model's configuration its mask token: the one it has, or else the token that is rarest in the rows,
    and of several the last: one that only fills up the vocabulary, or is reserved. None that has a task of its own.

    Raises:
        ConfigError: the model is of a family that is not trained so.
    """
    check_family(model, "Drafts in parallel are trained", "--parallel")
    if mask_token_of(model) is None:
        counts = token_counts(rows, model_vocabulary(model))[1]
        counts[tokenizer.all_special_ids] = int(counts.max()) + 1
        setattr(model.config, MASK_TOKEN, len(counts) - 1 - int(counts.flip(0).argmin()))
