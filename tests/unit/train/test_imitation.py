"""What a cut draft learns first: the states of the model that it was cut from, as inference computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from families import VOCAB, make_family, tiny_model
from forerun.models import Rows, load_model
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.defaults import DraftTraining
from forerun.train.draft.distil import ImitationLoss, StartStates
from forerun.train.draft.prune import cut
from forerun.train.evaluate import packed_inputs
from soft_labels import drawn_rows

QUIET = Console(quiet=True)
LENGTHS = [9, 2, 7]
BEGINS = [0, 9, 11]
DOCUMENTS = torch.repeat_interleave(torch.tensor([0, 1, 2, NO_DOCUMENT]), torch.tensor([*LENGTHS, 2]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo3"])
@torch.no_grad()
def test_the_loss_is_that_of_a_slow_loop(family: str) -> None:
    """Over documents alone, positions and numbers: distances over variances, and cross-entropies in the kept tokens."""
    draft = tiny_model(family)
    layers = 2
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=generator)
    states = torch.randn(2, 20, layers, 64, generator=generator)
    kept = torch.arange(3, VOCAB, 4)
    found = ImitationLoss(kept).mean(draft, (tokens.int(), DOCUMENTS.expand(2, -1), states))
    head = draft.get_output_embeddings().weight[kept]
    cap = getattr(draft.config, "final_logit_softcapping", None)

    def logits_of(state: Tensor) -> Tensor:
        return head @ state if cap is None else cap * torch.tanh(head @ state / cap)

    own: list[Tensor] = []
    wanted: list[Tensor] = []
    entropies = []
    for row in range(2):
        for begin, length in zip(BEGINS, LENGTHS, strict=True):
            places = slice(begin, begin + length)
            output = draft.base_model(tokens[row : row + 1, places], output_hidden_states=True, use_cache=False)
            assert torch.equal(output.hidden_states[-1], output.last_hidden_state)  # after the final norm
            for place in range(1, length):  # the first state of a document is like no other
                own.append(torch.stack([output.hidden_states[layer + 1][0, place] for layer in range(layers)]))
                wanted.append(states[row, begin + place])
                probs = torch.softmax(logits_of(wanted[-1][-1]), -1)
                entropies.append(-(probs * torch.log_softmax(logits_of(own[-1][-1]), -1)).sum())
    variances = torch.stack(wanted).var(0, correction=0)
    distance = ((torch.stack(own) - torch.stack(wanted)).square() / variances).mean()
    assert len(own) == 2 * (8 + 1 + 6)
    torch.testing.assert_close(found, distance + torch.stack(entropies).mean(), rtol=1e-3, atol=1e-4)


def test_states_of_the_start_are_those_of_inference(tmp_path: Path) -> None:
    start = make_family("qwen2", tmp_path, num_hidden_layers=4)
    rows = drawn_rows(tmp_path / "rows", VOCAB, [20, 9, 14, 25, 6])
    options = DraftTraining(window=31, tokens_per_step=62, device="cpu")
    states = StartStates(str(start), [2, 4], 64, rows, 96, 2, options, QUIET)
    model = load_model(start)
    for step in range(3):
        tokens, documents, found = states.batch(step)
        assert found.shape == (2, 31, 2, 64) and not found[documents == NO_DOCUMENT].any()
        for row in range(2):
            for number in range(int(documents[row].max()) + 1):
                places = documents[row] == number
                cache = model.new_cache()
                fed = Rows(cache, tokens[row, places].tolist(), num_hidden_outputs=int(places.sum()))
                wanted = model.forward([fed], [2, 4]).hidden_outputs
                cache.free()
                assert wanted is not None
                torch.testing.assert_close(found[row, places].float(), wanted.float(), rtol=2e-2, atol=2e-2)
    resumed = StartStates(str(start), [2, 4], 64, rows, 96, 2, options, QUIET)
    again = resumed.batch(2)
    assert all(torch.equal(one, two) for one, two in zip(again, states.batch(2), strict=True))


def test_a_draft_that_lacks_a_layer_which_does_nothing_has_nothing_to_learn(tmp_path: Path) -> None:
    """Its states are those that enter the next layers that it keeps: the indices of both agree."""
    model = tiny_model("qwen2", num_hidden_layers=4)
    with torch.no_grad():
        for idle in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            idle.weight.zero_()
    model.save_pretrained(tmp_path / "start")
    rows = drawn_rows(tmp_path / "rows", VOCAB, [20, 9])
    options = DraftTraining(device="cpu")
    cut(model, [0, 2, 3])
    batch = StartStates(str(tmp_path / "start"), [2, 3, 4], 64, rows, 96, 1, options, QUIET).batch(0)
    used = batch[1] != NO_DOCUMENT
    with torch.no_grad():
        loss = ImitationLoss().mean(model, batch)
        logits = model.lm_head(batch[2][used][1:, -1].float())
    least = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert float(loss) < float(least) + 0.05
    cut(model, [0, 2])
    with torch.no_grad():
        others = StartStates(str(tmp_path / "start"), [2, 4], 64, rows, 96, 1, options, QUIET).batch(0)
        assert float(ImitationLoss().mean(model, others)) > float(least) + 0.2


@pytest.mark.parametrize(("family", "scaled"), [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling")])
def test_logits_are_those_of_the_model(family: str, scaled: str) -> None:
    draft = tiny_model(family, **{scaled: 2.0})
    tokens = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))
    documents = torch.zeros(1, 20, dtype=torch.int64)
    with torch.no_grad():
        found = draft(tokens, use_cache=False, output_hidden_states=True)
        loss = ImitationLoss().mean(draft, (tokens.int(), documents, torch.stack(found.hidden_states[1:], 2)))
    least = torch.distributions.Categorical(logits=found.logits[0, 1:]).entropy().mean()
    assert float(loss) == pytest.approx(float(least), abs=1e-3)


def test_what_agrees_already_leaves_the_output_layer_alone() -> None:
    """The wanted distribution is of this very layer; sharper ones are not what is learnt."""
    draft = tiny_model("llama")
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    documents = DOCUMENTS.expand(2, -1)
    with torch.no_grad():
        inputs = packed_inputs(draft, tokens, documents)
        found = draft.base_model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[1:]
    ImitationLoss().mean(draft, (tokens.int(), documents, torch.stack(found, 2))).backward()
    gradient = draft.get_output_embeddings().weight.grad
    assert gradient is not None and float(gradient.abs().max()) < 1e-6
