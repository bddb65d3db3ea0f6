"""Training of drafts that read mask tokens: what a position sees, what is counted, and what is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from families import tiny_model
from forerun import LLM, DraftModel, SamplingParams
from forerun.errors import ConfigError
from forerun.models import load_model
from forerun.train import card as folder, commands
from forerun.train.corpus import SourceFile
from forerun.train.defaults import DraftTraining, Pruning
from forerun.train.draft.distil import DistillationLoss
from forerun.train.draft.parallel import MaskLayout, mask_token_of
from forerun.train.evaluate import acceptance_of, agreement_of, drafted_logits
from forerun.train.losses import distillation_loss
from soft_labels import softmax_top
from tools.lm import Architecture, build_model, train_tokenizer

SIZES = Architecture(
    vocab_size=320, hidden_size=32, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
MASK, K = 319, 4
LENGTHS = [9, 2, 7]


def drawn(seed: int = 0) -> LlamaForCausalLM:
    model = build_model(SIZES, 0, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, documents and wanted, [2, 20]: documents of LENGTHS and room behind them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (2, 20), generator=generator)
    documents = torch.full((2, 20), -1, dtype=torch.int32)
    documents[:, : sum(LENGTHS)] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).int()
    wanted = (torch.rand(2, 20, generator=generator) < 0.7) & (documents >= 0)
    wanted[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    wanted[:, 0] = False
    return tokens, documents, wanted


def alone(draft: PreTrainedModel, known: Tensor, depth: int) -> Tensor:
    """[V] the logits that a draft gives after known tokens and so many mask tokens, as it drafts."""
    fed = torch.cat([known, torch.full((depth,), MASK)])
    logits: Tensor = draft(fed[None]).logits[0, -1]
    return logits


def test_the_loss_is_that_of_every_chain_alone() -> None:
    target, draft = drawn(), drawn(1)
    draft.config.pard_token = MASK
    tokens, documents, wanted = packed()
    ids, values = softmax_top(target, tokens, 8, documents)
    rows = (tokens.int(), ids.int(), values, documents, wanted, torch.tensor([5, 6]))
    found = DistillationLoss("forward-kl", parallel=K).mean(draft, rows, 0.0)
    layout = MaskLayout.drawn(wanted[:, 1:], K, 5)
    counts = torch.bincount(layout.depths).tolist()
    assert counts == [19, 13, 9, 6]
    begins = np.cumsum([0, *LENGTHS])
    at: list[tuple[Tensor, Tensor, Tensor]] = []
    for row in range(2):
        for start, depth in zip(layout.starts[row].tolist(), layout.depths.tolist(), strict=True):
            place = start + depth
            if place < 19 and wanted[row, place + 1] and documents[row, start] == documents[row, place]:
                begin = begins[int(documents[row, start])]
                logits = alone(draft, tokens[row, begin : start + 1], depth)
                at.append((logits, ids[row, place], values[row, place]))
    by_hand = distillation_loss(*map(torch.stack, zip(*at, strict=True)), "forward-kl")  # type: ignore[arg-type]
    assert len(at) > 40 and float(found.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-3)


def test_a_start_has_a_mask_token_only_with_those_before_it_and_wanted_ones_come_first() -> None:
    wanted = torch.arange(40).expand(3, -1) >= 30
    layout = MaskLayout.drawn(wanted, 6, 1)
    former = set(range(40))
    for depth in range(1, 6):
        chosen = set(layout.starts[0, layout.depths == depth].tolist())
        assert chosen <= former and len(chosen) == int(40 * max(0.7**depth, 0.2))
        former = chosen
    assert former <= set(range(30, 40))
    again = MaskLayout.drawn(wanted, 6, 1)
    assert torch.equal(again.starts, layout.starts)
    assert not torch.equal(MaskLayout.drawn(wanted, 6, 2).starts, layout.starts)


@torch.inference_mode()
def test_acceptance_is_by_position_of_the_chains_that_it_drafts() -> None:
    """By a slow loop over starts, of the greedy chains along a text."""
    draft = drawn(1)
    draft.config.pard_token = MASK
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 300, (1, 24), generator=generator)
    for at in (12, 13, 14, 20):  # what it would say itself, so that some is accepted
        text[0, at] = alone(draft, text[0, :12], at - 12).argmax()
    drafted = list(drafted_logits(draft, text[:, :-1], None, K, first=5))
    for depth, logits in enumerate(drafted):
        for place in (0, 6, 17):
            wanted = alone(draft, text[0, : place + 6], depth)
            torch.testing.assert_close(logits[0, place], wanted, atol=1e-3, rtol=1e-3)
    agreed = agreement_of(drafted, torch.zeros(1, 18, 320), text[:, 6:], 0.0)
    assert agreed.shape == (1, K, 18) and agreed[0, :3, 6].tolist()[0] == 1.0
    assert [agreed[0, k, 6 + k].item() for k in range(3)] == [1.0, 1.0, 1.0]  # a chain lies on a diagonal
    (found,) = acceptance_of(list(agreed), 0.0, K)
    assert found.tokens == 18 and found.per_position[0] > 0


@torch.inference_mode()
def test_mask_tokens_see_no_further_than_the_window_of_a_draft() -> None:
    draft = tiny_model("mistral", vocab_size=320, sliding_window=6)
    draft.config.pard_token = MASK
    text = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(3))
    for depth, logits in enumerate(drafted_logits(draft, text, None, K, first=5)):
        for place in (0, 6, 17):
            wanted = alone(draft, text[0, : place + 6], depth)
            torch.testing.assert_close(logits[0, place], wanted, atol=1e-3, rtol=1e-3)


def test_a_trained_one_is_an_ordinary_folder_that_drafts_in_parallel(
    source_folder: Path, files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "Console", lambda: Console(quiet=True))
    tokenizer = train_tokenizer((file.text for file in files), SIZES.vocab_size)
    folder.save_model(drawn(), tokenizer, tmp_path / "target")
    options = DraftTraining(
        window=64,
        top=8,
        tokens=8 * 64,
        tokens_per_step=64,
        threads=1,
        pruning=Pruning(layers="1"),
        parallel=3,
    )
    out = tmp_path / "draft"
    before, _ = folder.load_model_and_tokenizer(tmp_path / "target")
    name = str(tmp_path / "target")
    commands.train_draft(out, tmp_path / "a", name, source_folder, options, "forerun train draft OUT")
    stored, _ = folder.load_model_and_tokenizer(out)
    mask = mask_token_of(stored)
    assert mask is not None and mask not in tokenizer.all_special_ids
    assert not torch.equal(stored.model.embed_tokens.weight, before.model.embed_tokens.weight)  # the mask's is learnt
    assert json.loads((out / "config.json").read_text())["pard_token"] == mask
    record = folder.read_record(out)
    assert [len(row["per_position"]) for row in record["acceptance"]] == [3, 3]
    target = load_model(tmp_path / "target")
    drafter = DraftModel(out)
    for params in (SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, max_tokens=20)):
        plain, drafted = (LLM(target, each, num_draft_tokens=3, tokenizer=tokenizer) for each in (None, drafter))
        found = drafted.generate([5, 6, 7], params)
        assert found.token_ids == plain.generate([5, 6, 7], params).token_ids and found.stats.num_draft_tokens > 10
    assert drafter.model.mask_token == mask
    anew = replace(options, parallel=None, pruning=Pruning(), minutes=1e-6)
    commands.train_draft(tmp_path / "c", tmp_path / "c.run", name, source_folder, anew, "", start=str(out))
    assert mask_token_of(folder.load_model_and_tokenizer(tmp_path / "c")[0]) is None
    with pytest.raises(ConfigError, match="parallel is 1, but must be"):
        replace(options, parallel=1)
