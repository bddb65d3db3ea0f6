"""Medusa heads for models of tests, and what they compute in plain PyTorch, row by row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.medusa.config import RANKS, MedusaConfig
from forerun.models import LanguageModel, Model, Rows

if TYPE_CHECKING:
    from heads import AdditiveModel, MarkovTarget

NUM_HEADS = 3
_STRAIGHT = 50.0
"""Where SiLU is the identity to the last bit of float64: x + 50 there, and a constant in all logits changes nothing."""


def medusa_config(target: LanguageModel, **options: Any) -> MedusaConfig:
    """Of heads as wide as the target that propose every token."""
    width = target.embedding_rows(torch.tensor([0])).shape[1]
    layers = (target.num_layers,) if isinstance(target, Model) else (1,)
    vocab = target.vocab_size
    return MedusaConfig(
        **{"vocab_size": vocab, "draft_vocab_size": vocab, "target_hidden_size": width, "num_heads": NUM_HEADS}
        | {"layers": layers}
        | options
    )


def random_medusa(
    target: Model, seed: int = 0, draft_vocab_size: int | None = None, **options: Any
) -> StoredHead[MedusaConfig]:
    """Heads of random weights that propose so many tokens, or all."""
    generator = torch.Generator().manual_seed(seed)
    vocab = target.vocab_size
    size = draft_vocab_size or vocab
    config = medusa_config(target, draft_vocab_size=size, **options)
    tensors = {
        name: torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5
        for name, shape in config.tensors().items()
    }
    if size == vocab:
        return StoredHead(config, tensors)
    tokens = torch.randperm(vocab, generator=generator)[:size].sort().values
    return StoredHead(config, tensors, tokens - torch.arange(size))


def fitted_medusa(target: Model, texts: Seq[Seq[int]]) -> StoredHead[MedusaConfig]:
    """Heads whose rows are the best linear map from the state to the tokens that come, by least squares."""
    config = medusa_config(target, output_rows="each")
    tensors = {name: torch.zeros(shape) for name, shape in config.tensors().items()}
    states = torch.cat([last_states(target, config, text)[: len(text) - 1 - NUM_HEADS] for text in texts]).double()
    products = states.T @ states
    products += 1e-2 * products.diagonal().mean() * torch.eye(len(products))
    for k in range(NUM_HEADS):
        tokens = torch.cat([torch.tensor(text[2 + k : len(text) + 1 - NUM_HEADS + k]) for text in texts])
        sums = torch.zeros(target.vocab_size, states.shape[1], dtype=torch.float64).index_add(0, tokens, states)
        tensors[f"lm_heads.{k}.weight"] = 80 * torch.linalg.solve(products, sums.T).T.float().contiguous()
    accuracies = tuple(0.3 / (1 + rank) for rank in range(RANKS)) * NUM_HEADS
    return StoredHead(replace(config, accuracies=accuracies), tensors)


def last_states(target: LanguageModel, config: MedusaConfig, text: Seq[int]) -> Tensor:
    """[n, H] the target's states of a text that heads read."""
    hidden_outputs = target.forward(
        [Rows(target.new_cache(), list(text), num_logits=0, num_hidden_outputs=len(text))], config.layers
    ).hidden_outputs
    assert hidden_outputs is not None
    return hidden_outputs[:, 0]


def reference_logits(head: StoredHead[MedusaConfig], target: LanguageModel, state: Tensor, tokens: Seq[int]) -> Tensor:
    """[V] float64 logits of head len(tokens) - 1, one number after another. tokens: from the last committed one on."""
    config, k = head.config, len(tokens) - 1
    weight = {name: tensor.double() for name, tensor in head.tensors.items()}
    x = state.double()
    for layer in range(config.num_layers):
        read = x
        if config.sequential and not layer:
            embeddings = target.embedding_rows(torch.tensor(list(tokens))).double()
            parts = [each / (each.pow(2).mean() + 1e-6).sqrt() for each in embeddings]
            read = torch.cat([x, *parts])
        z = weight[f"blocks.{k}.layers.{layer}.weight"] @ read + weight[f"blocks.{k}.layers.{layer}.bias"]
        x = x + z * z.sigmoid()
    proposed = torch.arange(config.draft_vocab_size) + (0 if head.d2t is None else head.d2t)
    if config.output_rows == "target":
        rows = target.output_rows(proposed).double()
    else:
        rows = weight["lm_head.weight" if config.output_rows == "one" else f"lm_heads.{k}.weight"]
    logits = torch.full((config.vocab_size,), -torch.inf, dtype=torch.float64)
    logits[proposed] = rows @ x
    return logits


def aligned_hydra(target: AdditiveModel | MarkovTarget, num_heads: int = 4) -> StoredHead[MedusaConfig]:
    """Heads in Hydra's order that are never wrong, if head k reads the state of token t and tokens t + 1 to t + 1 + k,
    and its logits are taken for token t + 2 + k."""
    vocab = target.vocab_size
    config = medusa_config(target, num_heads=num_heads, sequential=True)
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in config.tensors().items()}
    scale = (2 * vocab) ** -0.5  # an embedding is one number of as many, over its root mean square
    for k in range(num_heads):
        weight = tensors[f"blocks.{k}.layers.0.weight"]
        last = 2 * vocab * (1 + k) + vocab  # where token t + 1 + k stands
        weight[:vocab, last : last + vocab] = target.last.double().T * scale
        before = 2 * vocab * k + vocab
        weight[:vocab, before : before + vocab] = target.before.double().T * (scale if k else 1.0)
        tensors[f"blocks.{k}.layers.0.bias"][:vocab] = _STRAIGHT
    return StoredHead(config, tensors)


def aligned_medusa(target: MarkovTarget, num_heads: int = 4, greedy: bool = True) -> StoredHead[MedusaConfig]:
    """Heads over a target of order 1 that are never wrong about its greedy tokens; otherwise each has the target's
    distribution so far on, given the token whose state it reads."""
    vocab = target.vocab_size
    config = medusa_config(target, num_heads=num_heads, output_rows="each")
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in config.tensors().items()}
    table = target.table.double()
    step = torch.eye(vocab, dtype=torch.float64)[table.argmax(-1)] if greedy else table.softmax(-1)
    probs = step
    for k in range(num_heads):
        probs = probs @ step
        tensors[f"lm_heads.{k}.weight"][:, vocab:] = (probs + 1e-9).log().T
    return StoredHead(config, tensors)
