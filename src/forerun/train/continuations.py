"""Text that the target writes, with its distributions: what a draft is distilled on and measured on.

Whole batches of prompts of one length are continued together, so nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.train import attention
from forerun.train.accelerator import micro_tokens
from forerun.train.token_ids import model_vocabulary, stored_ids


@dataclass(frozen=True, slots=True)
class TopProbs:
    """The target's most probable tokens at every position, [B, T, k], most probable first.

    `ids` uint16 or uint32, `probabilities` float16; row t is the distribution of token t + 1. The tail is left out: it
    holds a few hundredths of the mass, and a draft so small cannot learn it.
    """

    ids: np.ndarray
    probabilities: np.ndarray


def next_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token a row from logits [B, V]: the most probable at temperature 0, otherwise drawn."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    distribution = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(distribution, 1, generator=generator).squeeze(-1)


@torch.inference_mode()
def top_probs_of(model: PreTrainedModel, tokens: Tensor, top: int, documents: Tensor | None = None) -> TopProbs:
    """The target's distributions at every position but the last of given text [B, T + 1]: [B, T, top].

    documents: [B, T + 1], where a row holds several (`samples.Shard`).
    """
    attention.use_for(model, tokens.shape[1] - 1)
    ids, probabilities = [], []
    for part in torch.split(torch.arange(len(tokens)), max(1, micro_tokens(model) // tokens.shape[1])):
        inputs = {"input_ids": tokens[part, :-1]}
        if documents is not None:
            inputs["attention_mask"] = attention.document_mask(documents[part, :-1])
        top_probabilities, top_ids = torch.softmax(model(**inputs, use_cache=False).logits.float(), -1).topk(top)
        ids.append(stored_ids(top_ids, model_vocabulary(model)))
        probabilities.append(top_probabilities.half().cpu())
    return TopProbs(np.concatenate(ids), torch.cat(probabilities).numpy())


@torch.inference_mode()
def write_on(model: PreTrainedModel, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    """Continue prompts [B, P] by `new_tokens` tokens each, without distributions: [B, P + new_tokens]."""
    attention.use_for(model, prompts.shape[1] + new_tokens)
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    cache = DynamicCache()
    tokens, fed = [prompts], prompts
    for _ in range(new_tokens):
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        fed = next_tokens(logits[:, -1], temperature, generator).unsqueeze(1)
        tokens.append(fed)
    return torch.cat(tokens, dim=1)
