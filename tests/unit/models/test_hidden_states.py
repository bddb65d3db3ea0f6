"""Hidden states of chosen layers: those of Transformers, and the same bits however the rows are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from families import FAMILIES, ONLY_FUSED, SCANNED, VOCAB, Folders
from forerun.errors import ConfigError
from forerun.models import Model, Rows, load_model
from forerun.types import Cache

LAYERS = (0, 1, 2)  # the last is the state after the final norm: but for Nemotron-H, the families have two layers
PROMPT = 250


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("families"))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def hidden_outputs(model: Model, batch: Sequence[Rows], layers: Sequence[int] = LAYERS) -> Tensor:
    states = model.forward(batch, layers).hidden_outputs
    assert states is not None
    return states


def prompted(model: Model, prompt: list[int]) -> Cache:
    cache = model.new_cache()
    model.forward([Rows(cache, prompt, num_logits=0)])
    cache.commit(range(len(prompt)))
    return cache


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("family", "kind"),
    [(name, kind) for name in FAMILIES for kind in ("auto", "general") if kind == "auto" or name not in ONLY_FUSED],
)
def test_states_are_those_of_transformers(family: str, kind: str, folders: dict[str, Path]) -> None:
    """Compare with Transformers, whose norms are computed in float32, also in a float64 model."""
    model = load_model(folders[family], dtype="float64", kind=kind)  # type: ignore[arg-type]
    reference = AutoModelForCausalLM.from_pretrained(
        folders[family], dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    prompt = tokens(70)
    with torch.inference_mode():
        states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        if family == "mamba2":  # it has what comes out of each layer, and the last one normed
            states = (reference.get_input_embeddings()(torch.tensor([prompt])), states[0], states[-1])
    expected = torch.stack([states[layer] for layer in LAYERS], 2)[0]
    cache = prompted(model, prompt[:40])
    own = hidden_outputs(model, [Rows(cache, prompt[40:])])
    assert own.dtype == torch.float64
    assert own.shape == (30, 3, 64)
    error = (own - expected[40:]).abs().amax((0, 2)) / expected[40:].abs().amax((0, 2))
    assert error.max() < (1e-4 if family in SCANNED else 1e-5), error


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_have_the_same_bits_however_rows_are_computed(family: str, dtype: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[family], dtype=dtype)
    if not model.exactness.exact:
        assert "experts" in str(model.exactness.reason)
        return
    prompt, new = tokens(PROMPT), tokens(10, seed=1)
    cache = prompted(model, prompt)
    alone = []
    for token_id in new:
        alone.append(hidden_outputs(model, [Rows(cache, [token_id])]))
        cache.commit([0])
    expected = torch.cat(alone)
    together = prompted(model, prompt)
    assert torch.equal(hidden_outputs(model, [Rows(together, new)]), expected)
    together.drop()
    others = [Rows(model.new_cache(), tokens(5, seed=2), num_logits=2), Rows(model.new_cache(), [3], num_logits=0)]
    beside = hidden_outputs(model, [others[0], Rows(together, new, num_logits=4), others[1]])
    assert torch.equal(beside[2:], expected[-4:])
    together.drop()
    tree = [new[0], *(token_id for node in range(1, 10) for token_id in (7, new[node]))]
    parents = [-1, *(2 * (node - 1) for node in range(1, 10) for _ in range(2))]
    assert torch.equal(hidden_outputs(model, [Rows(together, tree, parents)])[::2], expected)
    whole = hidden_outputs(model, [Rows(model.new_cache(), prompt + new)])
    assert torch.equal(whole[PROMPT:], expected)
    cache = model.new_cache()
    for start in range(0, PROMPT + 10, 52):
        part = (prompt + new)[start : start + 52]
        assert torch.equal(hidden_outputs(model, [Rows(cache, part)]), whole[start : start + 52])
        cache.commit(range(52))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_any_layers_may_be_asked_for(family: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[family], dtype="float32")
    everything = model.forward([Rows(model.new_cache(), [1, 2, 3])], LAYERS)
    for layers in ((0,), (1,), (2,), (0, 2)):
        own = model.forward([Rows(model.new_cache(), [1, 2, 3])], layers)
        assert own.hidden_outputs is not None and everything.hidden_outputs is not None
        assert torch.equal(own.hidden_outputs, everything.hidden_outputs[:, list(layers)])
        assert torch.equal(own.logits, everything.logits)
    none = model.forward([Rows(model.new_cache(), [1, 2, 3])])
    assert none.hidden_outputs is None
    assert torch.equal(none.logits, everything.logits)
    assert hidden_outputs(model, [Rows(model.new_cache(), [1, 2, 3], num_logits=0)]).shape == (0, 3, 64)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", [(3,), (-1,), (1, 0), (1, 1)])
def test_layers_that_are_not_there_are_refused(family: str, layers: Sequence[int], folders: dict[str, Path]) -> None:
    model = load_model(folders[family], dtype="float32")
    cache = model.new_cache()
    with pytest.raises(ConfigError, match=r"layers \[.*\] were requested, but they must rise and lie in 0\.\.2"):
        model.forward([Rows(cache, [1])], layers)
    assert cache.num_scratch == 0


def test_rows_that_go_on_from_a_layer(folders: dict[str, Path]) -> None:
    model = load_model(folders["llama"], dtype="bfloat16")
    prompt, new = tokens(30), [1, 2, 3]
    expected = hidden_outputs(model, [Rows(prompted(model, prompt), new), Rows(model.new_cache(), [5, 6])], (1, 2))
    cache = prompted(model, prompt)
    hidden, _ = model.forward_first([Rows(cache, new)], 1)
    resumed = Rows(cache, new, hidden=hidden, first_layer=1)
    other = model.new_cache()
    with pytest.raises(ValueError, match="layer 0 were requested, but rows go on from layer 1"):
        model.forward([resumed, Rows(other, [5, 6])], (0, 1))
    assert other.num_scratch == 0
    assert torch.equal(hidden_outputs(model, [resumed, Rows(other, [5, 6])], (1, 2)), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_on_the_device_are_not_read(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folders[family], dtype="float64")  # by the references, as on a device
    expected = model.forward([Rows(model.new_cache(), [1, 2, 3]), Rows(model.new_cache(), [4, 5], [-1, -1])])
    short = model.forward([Rows(model.new_cache(), [7])]).logits
    given = torch.tensor([1, 2, 3]), torch.tensor([7])

    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    for name in ("tolist", "item", "__int__", "__bool__", "__iter__", "numpy", "__index__"):
        monkeypatch.setattr(Tensor, name, read)
    batch = [Rows(model.new_cache(), given[0]), Rows(model.new_cache(), [4, 5], [-1, -1])]
    logits, alone = model.forward(batch).logits, model.forward([Rows(model.new_cache(), given[1])]).logits
    monkeypatch.undo()
    assert torch.equal(logits, expected.logits)
    assert torch.equal(alone, short)
