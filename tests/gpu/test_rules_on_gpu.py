"""Sampling and verification with their tensors on an accelerator: the decisions are those made on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun import SamplingParams
from forerun.sampling import LogitsPipeline, LogitsRow, StepNoise
from forerun.types import Draft, PackedDrafts, Sequence, Verdict
from forerun.verification import verify_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 64


def decide(rule: str, device: str) -> list[Verdict]:
    generator = torch.Generator().manual_seed(3)
    params = SamplingParams(temperature=0.8, top_k=40, repetition_penalty=1.2, seed=5 if rule == "coupled" else None)
    sequences = [Sequence(i, [1, 2, 3 + i], 3, params) for i in range(4)]
    drafts, rows = [], []
    for length, sequence in zip((0, 1, 4, 4), sequences, strict=True):
        probs = torch.rand(length + 1, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)
        tokens = torch.multinomial(probs[:length], 1, generator=generator).flatten() if length else []
        drafts.append(Draft.chain(tokens, None if rule in ("walk", "coupled") else probs.to(device)))
        path = drafts[-1].ids
        rows += [LogitsRow(sequence, path[:depth]) for depth in range(length + 1)]
    packed = PackedDrafts.of(drafts)
    logits: Tensor = torch.randn(len(rows), VOCAB, generator=generator, dtype=torch.float64).to(device)
    logprobs = LogitsPipeline(VOCAB).process(logits, rows)
    assert logprobs.device.type == device
    noise = StepNoise(torch.Generator().manual_seed(9), sequences, packed, device)
    return verify_step(packed, logprobs, [rule] * len(drafts), noise)


def decide_trees(rule: str, replacement: bool, device: str, dtype: torch.dtype) -> list[Verdict]:
    """Decide trees of 0 to 23 nodes with up to three children a row, drawn from distributions near the target's."""
    generator = torch.Generator().manual_seed(4)
    drafts, logits = [], []
    for size in range(24):
        parents = [(node - 3) // 3 if node >= 3 else -1 for node in range(size)]
        scores = torch.randn(size + 1, VOCAB, generator=generator, dtype=torch.float64) * 2
        probs, tokens = scores.softmax(-1), torch.zeros(size, dtype=torch.int64)
        for row in sorted({parent + 1 for parent in parents}):
            children = [node for node in range(size) if parents[node] + 1 == row]
            tokens[children] = torch.multinomial(probs[row], len(children), replacement, generator=generator)
        drafts.append(Draft(tokens, parents, probs.to(device, dtype), replacement))
        logits.append(scores + torch.randn(scores.shape, generator=generator, dtype=torch.float64) / 2)
    packed = PackedDrafts.of(drafts)
    logprobs = torch.cat(logits).log_softmax(-1).to(device, dtype)
    noise = StepNoise(torch.Generator().manual_seed(9), [], packed)
    return verify_step(packed, logprobs, [rule] * len(drafts), noise)


@pytest.mark.parametrize("rule", ["traversal", "multi-step"])
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_verdicts_on_trees_as_on_the_cpu(rule: str, replacement: bool, dtype: torch.dtype) -> None:
    verdicts = decide_trees(rule, replacement, "cuda", dtype)
    assert verdicts == decide_trees(rule, replacement, "cpu", dtype)
    assert {len(verdict.path) for verdict in verdicts} >= {0, 1, 2}


@pytest.mark.parametrize("rule", ["walk", "token", "block", "coupled"])
def test_same_verdicts_as_on_the_cpu(rule: str) -> None:
    assert decide(rule, "cuda") == decide(rule, "cpu")
