"""Random block heads for a model, and what a head computes in plain PyTorch: slowly, slot by slot, without a cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.heads.config import StoredHead
from forerun.models import LanguageModel, Model, Rows
from heads import MarkovTarget

FULL: dict[str, Any] = {
    "draft_vocab_size": 40,
    "markov_rank": 6,
    "confidence": True,
    "norm_before_fc": True,
    "sliding_window": 11,
    "rope_theta": 500.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "from the anchor": {"sample_from_anchor": True, "num_layers": 1, "mask_token_id": 3},
    "everything": FULL,
    "tokens": {"context_tokens": True, "num_layers": 1},
    "tokens and everything": {**FULL, "context_tokens": True, "num_layers": 1},
    "shared bias": {"markov_rank": 6, "markov_shared": True, "draft_vocab_size": 40, "confidence": True},
    "tokens and own rows": {
        "markov_rank": 5,
        "markov_shared": True,
        "context_tokens": True,
        "num_layers": 1,
        "draft_vocab_size": 40,
        "own_output_rows": True,
    },
    "own rows": {"draft_vocab_size": 40, "own_output_rows": True, "confidence": True},
}


def random_block(
    target: LanguageModel, seed: int = 0, draft_vocab_size: int | None = None, **options: Any
) -> StoredHead:
    """A head of random weights that reads two states and drafts blocks of four of so many tokens, or of all."""
    generator = torch.Generator().manual_seed(seed)
    vocab, width = target.vocab_size, target.embedding_rows(torch.tensor([0])).shape[1]
    size = draft_vocab_size or vocab
    layers = (0, target.num_layers) if isinstance(target, Model) else (1,)
    config = BlockConfig(
        **{
            "vocab_size": vocab,
            "draft_vocab_size": size,
            "hidden_size": width,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "layers": layers,
            "block_size": 4,
            **options,
        }
    )
    tensors = {}
    for name, shape in config.tensors().items():
        numbers = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * numbers if len(shape) == 1 else 1.5 * numbers * shape[1] ** -0.5
        if name.endswith(("q_norm.weight", "k_norm.weight", "o_proj.weight")):
            tensors[name] *= 3  # attention that tells positions from each other, and is heard
    if size == vocab:
        return StoredHead(config, tensors)
    tokens = torch.randperm(vocab, generator=generator)[:size].sort().values
    return StoredHead(config, tensors, tokens - torch.arange(size))


def hidden_outputs_of(target: LanguageModel, head: StoredHead, text: Seq[int]) -> Tensor:
    """[n, layers, H] the target's states of a text that the head reads."""
    rows = Rows(target.new_cache(), list(text), num_logits=0, num_hidden_outputs=len(text))
    hidden_outputs = target.forward([rows], head.config.layers).hidden_outputs
    assert hidden_outputs is not None
    return hidden_outputs


def proposed(head: StoredHead) -> Tensor:
    """The target's tokens that the head can propose."""
    return torch.arange(head.config.draft_vocab_size) + (0 if head.d2t is None else head.d2t)


def reference_block(head: StoredHead, target: LanguageModel, text: Seq[int], before: Seq[int]) -> tuple[Tensor, Tensor]:
    """[K, draft vocabulary] float64 logits of a block, and [K] what the confidence says (0 without one).

    Args:
        text: [n] the committed tokens.
        before: [K] the token before each that is drafted; the first is the text's last.
    """
    config: Any = head.config
    weight = {name: tensor.double() for name, tensor in head.tensors.items()}
    hidden_outputs = hidden_outputs_of(target, head, text[:-1])
    outputs = (_slots_of_pairs if config.context_tokens else _slots)(
        config, weight, target, hidden_outputs, text, len(before)
    )
    tokens = proposed(head)
    rows = weight["lm_head.weight"] if config.own_output_rows else target.output_rows(tokens).double()
    logits, sure = [], []
    for slot, token in zip(outputs, before, strict=True):
        output = _norm(config, slot, weight["norm.weight"])
        feature = output
        wanted = rows @ output
        if config.markov_shared:
            bias = weight["markov_head.markov_w1.weight"] @ _embedding(target, token)
            wanted = wanted + rows @ (weight["markov_head.markov_w2.weight"] @ bias)
        elif config.markov_rank:
            bias = weight["markov_head.markov_w1.weight"][token]
            wanted = wanted + weight["markov_head.markov_w2.weight"] @ bias
        if config.markov_rank:
            feature = torch.cat([output, bias]) if config.confidence_with_markov else output
        logits.append(wanted)
        if config.confidence:
            logit = weight["confidence_head.proj.weight"][0] @ feature + weight["confidence_head.proj.bias"][0]
            sure.append(logit.sigmoid())
        else:
            sure.append(torch.zeros((), dtype=torch.float64))
    return torch.stack(logits), torch.stack(sure)


def _slots(
    config: Any, weight: dict[str, Tensor], target: LanguageModel, hidden_outputs: Tensor, text: Seq[int], count: int
) -> list[Tensor]:
    """What the layers give for the slots that predict."""
    context = [
        _norm(config, _fused(config, weight, each.double()), weight["hidden_norm.weight"]) for each in hidden_outputs
    ]
    mask = weight.get("mask_embedding.weight")
    if mask is None:
        mask = target.embedding_rows(torch.tensor([config.mask_token_id]))[0].double()
    first = 0 if config.sample_from_anchor else 1
    slots = [_embedding(target, text[-1])] + [mask] * (count - 1 + first)
    for layer in range(config.num_layers):
        slots = _layer(config, weight, f"layers.{layer}", context, slots)
    return slots[first:]


def _slots_of_pairs(
    config: Any, weight: dict[str, Tensor], target: LanguageModel, hidden_outputs: Tensor, text: Seq[int], count: int
) -> list[Tensor]:
    """The same of a head with `context_tokens`: pairs of the token that follows and the states before it."""
    fused = [_fused(config, weight, each.double()) for each in hidden_outputs]
    context = [(_embedding(target, token), state) for token, state in zip(text[1:], fused, strict=True)]
    embedding, state = context[-1]
    own = zip(weight["slot_embeddings.weight"], weight["slot_states.weight"], strict=True)
    slots = [(embedding + a, state + b) for a, b in own][:count]
    norms = weight["midlayer.input_layernorm.weight"], weight["midlayer.hidden_norm.weight"]
    read = [torch.cat([_norm(config, x, norm) for x, norm in zip(pair, norms, strict=True)]) for pair in context]
    own_read = [torch.cat([_norm(config, x, norm) for x, norm in zip(pair, norms, strict=True)]) for pair in slots]
    attended = _attended(config, weight, "midlayer", [*read, *own_read], len(slots))
    residual = weight["embedding_residual.weight"]
    return [
        _behind(config, weight, "midlayer", residual @ one + _norm(config, other, norms[1]), each)
        for (one, other), each in zip(slots, attended, strict=True)
    ]


def _embedding(target: LanguageModel, token: int) -> Tensor:
    return target.embedding_rows(torch.tensor([token]))[0].double()


def _fused(config: Any, weight: dict[str, Tensor], states: Tensor) -> Tensor:
    """states: [layers, H]."""
    if config.norm_before_fc:
        states = torch.stack([_norm(config, each, weight[f"fc_norm.{i}.weight"]) for i, each in enumerate(states)])
    return weight["fc.weight"] @ states.flatten()


def _layer(
    config: Any, weight: dict[str, Tensor], name: str, context: list[Tensor], slots: list[Tensor]
) -> list[Tensor]:
    normed = [_norm(config, slot, weight[f"{name}.input_layernorm.weight"]) for slot in slots]
    attended = _attended(config, weight, name, [*context, *normed], len(slots))
    return [_behind(config, weight, name, slot, each) for slot, each in zip(slots, attended, strict=True)]


def _attended(config: Any, weight: dict[str, Tensor], name: str, seen: Seq[Tensor], count: int) -> list[Tensor]:
    """What the attention gives the last `count` positions. seen: by position, what keys and values are made of."""
    places = range(len(seen))
    if config.sliding_window is not None:
        places = places[-config.sliding_window :]
    group = config.num_heads // config.num_kv_heads

    @cache
    def projected(kind: str, position: int) -> Tensor:
        return weight[f"{name}.self_attn.{kind}_proj.weight"] @ seen[position]

    def part(kind: str, position: int, index: int) -> Tensor:
        return projected(kind, position)[index * config.head_dim :][: config.head_dim]

    @cache
    def turned(kind: str, position: int, index: int) -> Tensor:
        found, norm = part(kind, position, index), weight.get(f"{name}.self_attn.{kind}_norm.weight")
        return _rotated(config, found if norm is None else _norm(config, found, norm), position)

    outputs = []
    for place in range(len(seen) - count, len(seen)):
        heads = []
        for head in range(config.num_heads):
            scores = torch.stack([turned("q", place, head) @ turned("k", at, head // group) for at in places])
            accept_probs = (scores * config.head_dim**-0.5).softmax(0)
            heads.append(accept_probs @ torch.stack([part("v", at, head // group) for at in places]))
        outputs.append(torch.cat(heads))
    return outputs


def _behind(config: Any, weight: dict[str, Tensor], name: str, residual: Tensor, attended: Tensor) -> Tensor:
    """What a layer gives, of its residual and what its attention gives."""
    x = residual + weight[f"{name}.self_attn.o_proj.weight"] @ attended
    h = _norm(config, x, weight[f"{name}.post_attention_layernorm.weight"])
    gate, up = (weight[f"{name}.mlp.{kind}_proj.weight"] @ h for kind in ("gate", "up"))
    return x + weight[f"{name}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


def _rotated(config: Any, x: Tensor, position: int) -> Tensor:
    """Numbers i and i + D/2 turned by position * theta^(-2i/D)."""
    half = config.head_dim // 2
    angles = position * config.rope_theta ** -(torch.arange(half).double() / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def _norm(config: Any, x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean() + config.rms_norm_eps).rsqrt() * weight


def markov_block(target: MarkovTarget, noise: float = 0.0, seed: int = 9) -> StoredHead:
    """A head that knows the target's transitions by its Markov bias, with noise, and little of the states; token 0 is
    not among those that it can propose where there is noise."""
    vocab = target.vocab_size
    less = {"draft_vocab_size": vocab - 1} if noise else {}
    head = random_block(target, seed, markov_rank=vocab, num_layers=1, num_heads=2, num_kv_heads=1, **less)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: tensor * (noise if name == "norm.weight" else 1.0) for name, tensor in head.tensors.items()}
    bias = target.last.T[1:] if noise else target.last.T
    tensors["markov_head.markov_w1.weight"] = torch.eye(vocab, dtype=torch.float64)
    tensors["markov_head.markov_w2.weight"] = bias + noise * torch.randn(bias.shape, generator=generator)
    d2t = torch.ones(vocab - 1, dtype=torch.int64) if noise else None
    return StoredHead(head.config, tensors, d2t)


def fitted_block(target: Model, texts: Seq[Seq[int]]) -> StoredHead:
    """A head that guesses by the token before alone: its Markov bias is the output layer of the map of a token's
    embedding to its state that is best by least squares. What it computes of the states adds noise to that."""
    vocab, layers = target.vocab_size, target.num_layers
    width = target.embedding_rows(torch.tensor([0])).shape[1]
    head = random_block(target, layers=(layers // 2, layers), markov_rank=width, num_layers=1, confidence=True)
    read, wanted = [], []
    for text in texts:
        wanted.append(hidden_outputs_of(target, head, text)[:, -1].double())
        read.append(target.embedding_rows(torch.tensor(list(text))).double())
    x, y = torch.cat(read), torch.cat(wanted)
    products = x.T @ x
    products += 1e-3 * products.diagonal().mean() * torch.eye(width)
    every = torch.arange(vocab)
    tensors = dict(head.tensors)
    tensors["norm.weight"] = 1e-3 * tensors["norm.weight"]
    tensors["markov_head.markov_w1.weight"] = target.embedding_rows(every).clone()
    outward = target.output_rows(every).double() @ torch.linalg.solve(products, x.T @ y).T
    tensors["markov_head.markov_w2.weight"] = outward.float().contiguous()
    return StoredHead(head.config, tensors)
