"""The MTP layer of Qwen3.5: against Transformers' modules, and through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import VOCAB
from forerun.drafters.eagle.model import EagleModel
from forerun.drafters.mtp.checkpoint_format import read_mtp
from forerun.models import Model, Rows, load_model
from heads import states_of
from mtp_layers import expected_logits, with_mtp

DRAFTED = [5, 9, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp(tmp_path_factory.mktemp("mtp"))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(target: Model, folder: Path, text: list[int], drafted: list[int]) -> torch.Tensor:
    """The layer's logits of a text in two chunks, and of drafted tokens row by row."""
    head = read_mtp(target, str(folder))
    model, found = EagleModel(head, target), []
    cache, states = model.new_cache(), model.fuse(states_of(target, head, text[:-1]))
    for part in (slice(0, 7), slice(7, None)):
        result = model.forward([Rows(cache, text[1:][part], states=states[part])])
        cache.commit(range(len(text[1:][part])))
        found.append(result.logits)
    for token in drafted:
        assert result.hidden_outputs is not None
        result = model.forward([Rows(cache, [token], states=result.hidden_outputs[-1])])
        found.append(result.logits)
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_the_layer_is_that_of_the_checkpoint(kind: str, folder: Path) -> None:
    text = tokens(23, 1)
    target = load_model(folder, "float64" if kind == "reference" else "float32")
    found = logits_of(target, folder, text, DRAFTED).double()
    expected = expected_logits(folder, text, DRAFTED)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < (1e-5 if kind == "reference" else 2e-4)
