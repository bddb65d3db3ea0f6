"""Models with their tensors on an accelerator: tokens, trees and hidden states are those of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import VOCAB, make_family
from forerun.models import Model, Rows, load_model
from forerun.types import Cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llama", "mistral", "gemma2", "gpt2", "mixtral", "gpt_oss")
PARENTS = [-1, 0, 0, 1, 1, 2, 4, -1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_family(name, root) for name in FAMILIES}


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompted(model: Model, prompt: Sequence[int]) -> Cache:
    cache = model.new_cache()
    model.forward([Rows(cache, prompt, num_logits=0)])
    cache.commit(range(len(prompt)))
    return cache


def greedy(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """Decode greedily; tokens are read at the end, and each is fed from the device."""
    cache, drawn = prompted(model, prompt[:-1]), [torch.tensor([prompt[-1]], device=model.device)]
    for _ in range(count):
        drawn.append(model.forward([Rows(cache, drawn[-1])]).logits.argmax(-1))
        cache.commit([0])
    return torch.cat(drawn[1:]).tolist()


def close(own: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert own is not None and expected is not None
    assert own.device.type == "cuda"
    torch.testing.assert_close(own.cpu().double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_gives_the_tokens_of_the_cpu(family: str, folders: dict[str, Path]) -> None:
    here, there = (load_model(folders[family], "float64", device=device) for device in ("cpu", "cuda"))
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    for length in (5, 250):
        assert greedy(there, tokens(length), 20) == greedy(here, tokens(length), 20)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-3), ("bfloat16", 0.3)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("mixtral", "gpt_oss")])
def test_batches_and_hidden_states(family: str, dtype: str, tolerance: float, folders: dict[str, Path]) -> None:
    """Compare a tree, one that crosses a border of keys, a chain whose tokens lie on the device, and a prompt. Mixtures
    may choose other experts where two are nearly as good."""
    results = []
    for device in ("cpu", "cuda"):
        model = load_model(folders[family], dtype, device=device)
        caches = [prompted(model, tokens(length, seed=length)) for length in (30, 253, 61)]
        batch = [
            Rows(caches[0], tokens(8), PARENTS),
            Rows(caches[1], tokens(8, seed=1), PARENTS),
            Rows(caches[2], torch.tensor([1, 2, 3], device=model.device)),
            Rows(model.new_cache(), tokens(40, seed=2), num_logits=3),
        ]
        results.append(model.forward(batch, (0, 1, 2)))
        caches[0].commit([0, 2, 5])
        caches[1].commit([0, 1, 4, 6])
        results.append(model.forward([Rows(cache, [9]) for cache in caches[:2]], (2,)))
    for expected, own in zip(results[:2], results[2:], strict=True):
        close(own.logits, expected.logits, tolerance)
        close(own.hidden_outputs, expected.hidden_outputs, tolerance)


def test_rows_go_on_from_a_layer(folders: dict[str, Path]) -> None:
    model = load_model(folders["llama"], "float64", device="cuda")
    expected = model.forward([Rows(prompted(model, tokens(30)), [1, 2, 3])]).logits
    cache = prompted(model, tokens(30))
    hidden, _ = model.forward_first([Rows(cache, [1, 2, 3])], 1)
    own = model.forward([Rows(cache, [1, 2, 3], hidden=hidden, first_layer=1)]).logits
    close(own, expected.cpu(), 1e-9)


def test_the_self_test_names_what_it_tried(folders: dict[str, Path]) -> None:
    for family in ("llama", "gpt2"):
        exactness = load_model(folders[family], "bfloat16", device="cuda").exactness
        assert exactness.exact or exactness.reason
