"""The first fit of a cut draft: matrices that are solved for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from families import VOCAB, tiny_model
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.draft.fit import RIDGE, can_fit, fit
from forerun.train.draft.prune import cut
from forerun.train.evaluate import behind_first, packed_inputs

ROWS, WINDOW = 24, 40


def rows() -> tuple[Tensor, Tensor]:
    """Draw packed rows of two documents each with room behind them: tokens and documents [ROWS, WINDOW]."""
    tokens = torch.randint(0, VOCAB, (ROWS, WINDOW), generator=torch.Generator().manual_seed(1))
    documents = torch.repeat_interleave(torch.tensor([0, 1, NO_DOCUMENT]), torch.tensor([17, 20, 3]))
    return tokens.int(), documents.expand(ROWS, -1)


@torch.no_grad()
def states(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Return the states that enter each layer but the first, and the last one after the norm: [ROWS, WINDOW, H]."""
    tokens, documents = rows()
    inputs = packed_inputs(model, tokens.long(), documents)
    found: tuple[Tensor, ...] = model.base_model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
    return found[1:]


def distances(draft: PreTrainedModel, wanted: Tensor) -> list[float]:
    """Return the squared distance of each layer's state from the wanted one, over its square."""
    used = behind_first(rows()[1])
    own = torch.stack(states(draft), 2)[used]
    missing = (own - wanted[used]).square().sum((0, 2)) / wanted[used].square().sum((0, 2))
    return missing.tolist()


@torch.no_grad()
def test_a_last_matrix_that_was_lost_is_found_again() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    wanted = torch.stack(states(model), 2)
    draft = copy.deepcopy(model)
    for layer in (0, 2):
        draft.model.layers[layer].mlp.down_proj.weight.zero_()
    before = distances(draft, wanted)
    assert fit(draft, *rows(), wanted) == 2
    after = distances(draft, wanted)
    assert all(found < 0.02 < 5 * found + 0.1 < lost for found, lost in zip(after, before, strict=True)), (
        before,
        after,
    )


@torch.no_grad()
def test_the_change_is_that_of_a_ridge_regression_in_float64() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    model.model.norm.weight[3] = 0  # whose number is not to be known
    wanted = torch.stack(states(model), 2)[:, :, 1:]
    draft = copy.deepcopy(model)
    cut(draft, [0])
    seen: list[Tensor] = []
    handle = draft.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ends: list[Tensor] = []
    other = draft.model.norm.register_forward_pre_hook(lambda _, given: ends.append(given[0]))
    before = draft.model.layers[0].mlp.down_proj.weight.clone()
    states(draft)
    handle.remove()
    other.remove()
    used = behind_first(rows()[1])
    own = ends[0][used].double()
    goal = wanted[used][:, 0].double() / draft.model.norm.weight * own.square().mean(1, keepdim=True).sqrt()
    goal[:, 3] = own[:, 3]
    factor = goal.square().mean(1, keepdim=True).rsqrt()
    inputs = seen[0][used].double() * factor
    squares = inputs.T @ inputs
    penalty = RIDGE / 2 * (squares.diagonal() + squares.diagonal().mean())
    change = torch.linalg.solve(squares + penalty.diag(), inputs.T @ ((goal - own) * factor))
    assert fit(draft, *rows(), wanted) == 1
    torch.testing.assert_close(
        draft.model.layers[0].mlp.down_proj.weight - before, change.T.float(), rtol=1e-3, atol=1e-4
    )


@torch.no_grad()
def test_states_of_the_last_layers_alone_give_the_same() -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    wanted = torch.stack(states(model), 2)[:, :, [0, 2, 4]]
    whole = copy.deepcopy(model)
    cut(whole, [0, 1, 3])
    draft = copy.deepcopy(whole)
    assert fit(whole, *rows(), wanted) == fit(draft, *rows(), wanted[:, :, 1:]) == 2
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), draft.parameters(), strict=True))


@torch.no_grad()
def test_what_does_its_work_already_stays_as_it_is() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    for idle in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        idle.weight.zero_()
    wanted = torch.stack(states(model), 2)[:, :, [1, 2]]
    cut(model, [0, 2])
    before = copy.deepcopy(model.state_dict())
    assert fit(model, *rows(), wanted) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("family", "can"), [("llama", True), ("qwen2", True), ("gemma2", False), ("gpt2", False)])
def test_matrices_with_a_norm_behind_them_are_not_fitted(family: str, can: bool) -> None:
    assert can_fit(tiny_model(family)) is can
