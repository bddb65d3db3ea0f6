"""torch's operations by as many threads as calls of the native kernels take: with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forerun.config import SamplingParams
from forerun.kernels.cpu import load_library, paced_threads
from forerun.kernels.cpu.library import Library
from forerun.sampling import LogitsPipeline, LogitsRow, StepNoise, draw_tokens
from forerun.types import Draft, PackedDrafts, Sequence
from forerun.verification import VERIFIERS
from forerun.verification.chain_rejection import Rejection
from forerun.verification.chain_rejection_math import BLOCK

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_k": 20_000},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"min_p": 0.02},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 2.0}},
)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make calls of the kernels take a number of threads, of torch's 4."""
    library = load_library()
    if not isinstance(library, Library) or not library.shares_openmp:
        pytest.skip("the kernels do not run on torch's threads")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield lambda number: monkeypatch.setattr(library, "threads", lambda most: number, raising=False)
    torch.set_num_threads(before)


def test_the_number_of_threads_holds_inside_alone(take: Callable[[int], None]) -> None:
    found = []

    @paced_threads()
    def fail() -> None:
        found.append(torch.get_num_threads())
        with paced_threads():
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())
        raise KeyError

    take(3)
    with pytest.raises(KeyError):
        fail()
    assert [*found, torch.get_num_threads()] == [3, 3, 3, 4]


def test_a_thread_whose_calls_did_not_wait_takes_all() -> None:
    library = load_library()
    if not isinstance(library, Library):
        pytest.skip("there are no native kernels")
    assert [library.threads(most) for most in (1, 2, 16)] == [1, 2, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [49_152, 151_643])
@pytest.mark.parametrize("rows", [1, 3])
def test_distributions_and_draws_have_the_same_bits(
    take: Callable[[int], None], rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 4).to(dtype)
    probs = torch.randn(rows, vocab_size, generator=generator).softmax(-1).to(dtype)
    chain = Draft.chain(list(range(rows - 1)), probs)

    def computed(options: dict[str, Any]) -> list[object]:
        sequence = Sequence(0, [1, 2, 3, 2], 2, SamplingParams(**{"temperature": 1.0} | options))
        pipeline = LogitsPipeline(vocab_size)
        stands = [LogitsRow(sequence)] * rows
        logprobs = pipeline.process(logits, stands)
        weights = pipeline.probabilities(logits, stands)
        found: list[object] = [logprobs.numpy().tobytes(), weights.numpy().tobytes()]
        found.append(draw_tokens(weights, torch.full((rows,), 0.7, dtype=torch.float64)).tolist())
        packed = PackedDrafts.of([chain])
        for rule in ("walk", "coupled", "block", "token"):
            noise = StepNoise(torch.Generator().manual_seed(1), [sequence], packed)
            found.append(VERIFIERS[rule].verify(packed, logprobs, noise))
        accept_probs, left, masses = Rejection(BLOCK).weigh(packed, logprobs.exp())
        return [*found, accept_probs, left.numpy().tobytes(), masses]

    for options in OPTIONS:
        take(4)
        whole = computed(options)
        for threads in (1, 3):
            take(threads)
            assert computed(options) == whole, (options, threads)
