"""Random EAGLE heads for a model, and what a head computes in plain PyTorch: slowly, row by row, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.heads.eagle_config import EagleConfig, eagle_tensors
from forerun.models import LanguageModel, Model


@dataclass
class Head:
    """A head as it is stored."""

    config: EagleConfig
    tensors: dict[str, Tensor]
    d2t: Tensor | None = None
    fingerprint: str | None = None
    record: dict[str, Any] = field(default_factory=dict)


def random_head(target: Model, seed: int = 0, draft_vocab_size: int | None = None, **options: Any) -> Head:
    """A head of random weights that reads two states (version 1: one) and proposes so many tokens, or all."""
    generator = torch.Generator().manual_seed(seed)
    version = options.pop("version", 3)
    vocab, width = target.vocab_size, target.embedding_rows(torch.tensor([0])).shape[1]
    size = draft_vocab_size or vocab
    layers = (target.num_layers,) if version == 1 else (0, target.num_layers)
    config = EagleConfig(
        **{
            "version": version,
            "vocab_size": vocab,
            "draft_vocab_size": size,
            "hidden_size": width,
            "target_hidden_size": width,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "layers": layers,
            **options,
        }
    )
    tensors = {}
    for name, shape in eagle_tensors(config).items():
        numbers = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * numbers if len(shape) == 1 else 1.5 * numbers * shape[1] ** -0.5
    if size == vocab:
        return Head(config, tensors)
    tokens = torch.randperm(vocab, generator=generator)[:size].sort().values
    return Head(config, tensors, tokens - torch.arange(size))


def reference_logits(
    head: Head, target: LanguageModel, token_ids: Sequence[int], taps: Tensor, num_drafted: int = 0
) -> Tensor:
    """[n, V] float64 logits of each row of a chain.

    Args:
        token_ids: [n] of each row: row i holds the token that comes after position i.
        taps: [n - num_drafted, layers, H] of the target, of the first rows.
        num_drafted: the last rows, whose states are the outputs of the rows before them.
    """
    config = head.config
    weight = {name: tensor.double() for name, tensor in head.tensors.items()}
    fused = [_fused(config, weight, each.double()) for each in taps]
    embedding = target.embedding_rows(torch.tensor(list(token_ids))).double()
    outputs: list[Tensor] = []
    inputs: list[tuple[Tensor, Tensor]] = []
    for row in range(len(token_ids)):
        state = fused[row] if row < len(token_ids) - num_drafted else outputs[-1]
        inputs.append(_entering(config, weight, embedding[row], state))
        outputs.append(_passed_on(config, weight, _row(config, weight, inputs)))
    logits = torch.full((len(token_ids), config.vocab_size), -torch.inf, dtype=torch.float64)
    tokens = torch.arange(config.draft_vocab_size) + (0 if head.d2t is None else head.d2t)
    rows = weight["lm_head.weight"] if config.own_output_rows else target.output_rows(tokens).double()
    for row in range(len(token_ids)):
        raw = _row(config, weight, inputs[: row + 1])
        normed = _norm(raw, weight["norm.weight"], config) if config.version == 3 else raw
        for place, token in enumerate(tokens.tolist()):
            logits[row, token] = rows[place] @ normed
    return logits


def _fused(config: EagleConfig, weight: dict[str, Tensor], states: Tensor) -> Tensor:
    """states: [layers, H]."""
    if config.version == 1:
        return states[0]
    if config.norm_before_fc:
        states = torch.stack([_norm(each, weight[f"fc_norm.{i}.weight"], config) for i, each in enumerate(states)])
    return weight["fc.weight"] @ states.flatten()


def _entering(
    config: EagleConfig, weight: dict[str, Tensor], embedding: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What attention reads of a row, and the row's residual."""
    if config.version == 1:
        x = weight["fc.weight"] @ torch.cat([embedding, state])
        return x, x
    normed = _norm(state, weight["midlayer.hidden_norm.weight"], config)
    read = torch.cat([_norm(embedding, weight["midlayer.input_layernorm.weight"], config), normed])
    residual = normed if config.norm_before_residual else state
    if config.embedding_residual:
        residual = residual + weight["embedding_residual.weight"] @ embedding
    return read, residual


def _row(config: EagleConfig, weight: dict[str, Tensor], inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What the layer gives for the last of these rows."""
    layer = "layers.0" if config.version == 1 else "midlayer"
    last = len(inputs) - 1
    window = config.sliding_window or len(inputs)
    seen = range(max(0, last - window + 1), last + 1)
    heads = []
    for head in range(config.num_heads):
        group = head // (config.num_heads // config.num_kv_heads)

        def part(name: str, row: int, index: int) -> Tensor:
            width = config.head_dim
            return (weight[f"{layer}.self_attn.{name}_proj.weight"] @ inputs[row][0])[index * width :][:width]

        query = _rotated(config, part("q", last, head), last)
        scores = torch.stack([query @ _rotated(config, part("k", row, group), row) for row in seen])
        chances = (scores * config.head_dim**-0.5).softmax(0)
        heads.append(sum(chance * part("v", row, group) for chance, row in zip(chances, seen, strict=True)))
    x = inputs[last][1] + weight[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(heads)  # type: ignore[arg-type]
    h = _norm(x, weight[f"{layer}.post_attention_layernorm.weight"], config)
    gate, up = (weight[f"{layer}.mlp.{name}_proj.weight"] @ h for name in ("gate", "up"))
    down: Tensor = weight[f"{layer}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return x + down


def _passed_on(config: EagleConfig, weight: dict[str, Tensor], output: Tensor) -> Tensor:
    return _norm(output, weight["norm.weight"], config) if config.norm_output else output


def _rotated(config: EagleConfig, x: Tensor, position: int) -> Tensor:
    """Numbers i and i + D/2 turned by position * theta^(-2i/D)."""
    half = config.head_dim // 2
    angles = position * config.rope_theta ** -(torch.arange(half).double() / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def _norm(x: Tensor, weight: Tensor, config: EagleConfig) -> Tensor:
    return x * (x.pow(2).mean() + config.rms_norm_eps).rsqrt() * weight
