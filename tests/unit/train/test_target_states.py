"""States in training are those that drafting reads, whatever is computed together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import make_family
from forerun.errors import ConfigError
from forerun.models import Model, Rows, load_model
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads import target_states
from forerun.train.heads.module import document_lengths
from forerun.train.heads.target_states import PackedStates, TargetStates
from gguf_files import write_gguf
from gguf_models import tiny

LENGTHS = [5, 70, 1, 33]


@pytest.fixture(scope="module", params=["bundled", "Q4_0", "reference"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The bundled target; a GGUF file whose blocks are computed with as they are stored; PyTorch's decoder."""
    folder = tmp_path_factory.mktemp("target")
    if request.param == "bundled":
        return load_model("bundled")
    if request.param == "reference":
        return load_model(make_family("llama", folder), dtype="float64")
    write_gguf(folder / "it.gguf", tiny("qwen2"), "Q4_0")
    model = load_model(folder / "it.gguf")
    assert model.quantize == "Q4_0"
    return model


def drawn(model: Model) -> Tensor:
    return torch.randint(0, model.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def of_inference(model: Model, token_ids: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """States and logits of one document, all of whose rows are asked for."""
    cache = model.new_cache()
    found = model.forward([Rows(cache, list(token_ids))], layers)
    cache.free()
    assert found.hidden_outputs is not None
    return found.hidden_outputs, found.logits


@pytest.mark.parametrize("rows", [1, 80, 512])
def test_states_are_those_of_inference(rows: int, target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(target_states.FORWARD_ROWS, "cpu", rows)
    token_ids = drawn(target)
    layers = (1, target.num_layers)
    found = TargetStates(target, layers).of(token_ids, LENGTHS)
    expected = [of_inference(target, part.tolist(), layers)[0] for part in token_ids.split(LENGTHS)]
    assert torch.equal(found, torch.cat(expected).bfloat16())
    assert not found.is_inference() and target.pool.num_taken == 0


def test_what_the_target_predicts_is_asked_of_the_last_tokens(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(target_states.FORWARD_LOGITS, "cpu", 40 * target.vocab_size)
    token_ids = drawn(target)
    vocabulary = torch.arange(0, target.vocab_size, 3)
    counts = [2, 30, 0, 33]
    states, likeliest, mass = TargetStates(target, (target.num_layers,)).judged(token_ids, LENGTHS, counts, vocabulary)
    assert torch.equal(states, TargetStates(target, (target.num_layers,)).of(token_ids, LENGTHS))
    parts = zip(token_ids.split(LENGTHS), likeliest.split(LENGTHS), mass.split(LENGTHS), counts)
    for text, chosen, share, count in parts:
        logits = of_inference(target, text.tolist(), (1,))[1]
        first = len(text) - count
        assert torch.equal(chosen[first:], logits.argmax(-1)[first:]) and (chosen[:first] == -1).all()
        expected = logits.softmax(-1)[:, vocabulary].sum(-1).float()
        assert torch.allclose(share[first:], expected[first:], atol=1e-5)


def test_rows_are_computed_together_or_read(target: Model, tmp_path: Path) -> None:
    """Rows of several documents, with nothing at their ends; the file of one of them was damaged."""
    documents = torch.full((2, 40), NO_DOCUMENT, dtype=torch.int32)
    documents[0, :40] = torch.tensor([0] * 12 + [1] * 28)
    documents[1, :9] = 0
    tokens = torch.randint(0, target.vocab_size, documents.shape, generator=torch.Generator().manual_seed(1))
    states = TargetStates(target, (0, target.num_layers))
    used = documents != NO_DOCUMENT
    expected = states.of(tokens[used], document_lengths(documents, used))
    kept = PackedStates(states, tmp_path, 1 << 20)
    for each in (PackedStates(states), kept, kept, PackedStates(states, tmp_path, 1 << 20)):
        found = each.of(tokens, documents)
        assert torch.equal(found[used], expected) and not found[~used].any()
        files = sorted(tmp_path.glob("row-*"))
        if each is kept:
            assert len(files) == 2
            files[0].write_bytes(b"damaged")


def test_a_full_disk_is_told(target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "states").write_text("a file where the folder should be")
    kept = PackedStates(TargetStates(target, (1,)), tmp_path / "states", 1 << 20)
    with pytest.raises(ConfigError):
        kept.of(torch.ones(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int32))
