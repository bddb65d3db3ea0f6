"""A draft model that reads mask tokens is fed committed tokens and masks, and keeps nothing of the masks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from against_plain import assert_output_is_plain
from doubles import FakeModel
from forerun import LLM, DraftModel, DraftTree, SamplingParams, Staged
from forerun.config import EngineConfig
from forerun.drafters import Binding
from forerun.drafters.growth.parallel import ParallelGrowth
from forerun.errors import ModelLoadError
from forerun.models import load_draft_model
from forerun.types import Draft, Sequence, Step, Verdict

GREEDY = SamplingParams(temperature=0)
MASK, K = 10, 4


def masked(seed: int = 0, **options: Any) -> FakeModel:
    fake = FakeModel(seed=seed, **options)
    fake.mask_token = MASK
    return fake


def bound(fake: Any) -> DraftModel:
    drafter = DraftModel(fake)
    target: Any = FakeModel()
    drafter.bind(Binding(target, seed=1))
    return drafter


def begun(fake: FakeModel, tokens: list[int], params: SamplingParams = GREEDY) -> tuple[DraftModel, Sequence]:
    drafter = bound(fake)
    sequence = Sequence(0, list(tokens), len(tokens), params)
    drafter.start(sequence)
    return drafter, sequence


def chain(fake: FakeModel, tokens: list[int], count: int) -> list[int]:
    """What the model says after its committed tokens, and after 1 to count - 1 mask tokens behind them."""
    return [int(fake.logits_after([*tokens, *[MASK] * i]).argmax()) for i in range(count)]


def settle(drafter: DraftModel, sequence: Sequence, draft: Draft, accepted: int, bonus: int) -> None:
    sequence.token_ids += [*draft.ids[:accepted], bonus]
    verdict = Verdict(list(range(accepted)), bonus)
    drafter.commit([Step(sequence, draft, verdict, len(sequence.token_ids) - 1)])


def test_one_forward_of_committed_and_mask_tokens_of_which_the_former_stay() -> None:
    fake = masked()
    drafter, sequence = begun(fake, [1, 2, 3])
    fed: list[list[int]] = []
    fake.before_forward = lambda batch: fed.extend(list(rows.token_ids) for rows in batch)
    (draft,) = drafter.draft([sequence], [K])
    assert draft.ids == chain(fake, [1, 2, 3], K) and draft.probs is None
    assert fake.caches[-1].num_scratch == 3
    settle(drafter, sequence, draft, 2, 7)
    assert fake.caches[-1].tokens == [1, 2, 3] and fake.caches[-1].num_scratch == 0
    (again,) = drafter.draft([sequence], [K])
    assert fed == [[1, 2, 3, MASK, MASK, MASK], [*draft.ids[:2], 7, MASK, MASK, MASK]]
    assert again.ids == chain(fake, sequence.token_ids, K)
    drafter.draft([sequence], [1])
    assert fed[-1] == [7]  # asked again without a verdict: the last token may be fed anew


def test_any_history_gives_the_same_chains() -> None:
    rng = random.Random(0)
    fake = masked()
    drafter, first = begun(fake, [4, 2])
    others = [Sequence(i, [rng.randrange(10) for _ in range(i)], i, GREEDY) for i in (1, 5, 40)]
    for each in others:
        drafter.start(each)
    for _ in range(100):
        some = rng.sample([first, *others], rng.randint(1, 4))
        budgets = [rng.choice([0, 1, 2, 6]) for _ in some]
        for each, budget, draft in zip(some, budgets, drafter.draft(some, budgets), strict=True):
            assert draft.ids == chain(fake, each.token_ids, budget)
            settle(drafter, each, draft, rng.randint(0, len(draft)), rng.randrange(10))
    for each in (first, *others):
        drafter.stop(each)
    assert all(cache.freed for cache in fake.caches)


@pytest.mark.parametrize("seed", range(3))
def test_output_is_plain_whatever_it_drafts(seed: int) -> None:
    config = EngineConfig(num_draft_tokens=2 + seed, max_batch=3)
    assert_output_is_plain(FakeModel(), bound(masked()), config, random.Random(seed))


def test_a_seeded_chain_adds_the_noise_of_its_positions() -> None:
    """The draft is the target, and its mask token makes no difference to its first token: that is always accepted."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    target: Any = FakeModel(seed=3)
    llm = LLM(target, DraftModel(masked(seed=3)), num_draft_tokens=1)  # type: ignore[arg-type]
    stats = llm.generate([1, 2, 3], params).stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_a_price_ends_greedy_chains_and_never_drops_a_drawn_token(options: dict[str, float]) -> None:
    params = replace(GREEDY, **options)
    drafter, sequence = begun(masked(), [1, 2, 3], params)
    (whole,) = drafter.draft([sequence], [6])
    (cut,) = drafter.draft([sequence], [6], 0.2)
    assert cut.ids == whole.ids[: len(cut)] and len(cut) < 6 == len(whole)
    drawn, sequence = begun(masked(), [1, 2, 3], replace(params, temperature=1.0))
    lengths = {len(drawn.draft([sequence], [6], 0.5)[0]) for _ in range(20)}
    assert min(lengths) >= 1 and max(lengths) < 6
    (draft,) = drawn.draft([sequence], [6], 0.99999)
    assert len(draft) == 1 and draft.probs is not None and len(draft.probs) == 2


def test_a_chain_ends_before_a_row_that_is_no_number() -> None:
    fake = masked()
    drafter, sequence = begun(fake, [1, 2, 3])
    whole = chain(fake, [1, 2, 3], K)
    fake.table[fake.slot([2, 3, MASK])] = torch.nan
    assert [drafter.draft([sequence], [K], minimum)[0].ids for minimum in (0.0, 1e-9)] == [whole[:1]] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    model.config.pard_token = 63
    place = tmp_path_factory.mktemp("pard") / "draft"
    model.save_pretrained(place)
    return place


def test_a_published_checkpoint_says_so_itself(folder: Path, tmp_path: Path) -> None:
    """Drafts are those of Transformers' model on the same tokens, at the positions that follow."""
    drafter = DraftModel(folder, dtype="float32")
    target = load_draft_model(folder)
    drafter.bind(Binding(target))
    assert isinstance(drafter.growth, ParallelGrowth) and drafter.model.mask_token == 63
    sequence = Sequence(0, [5, 6, 7], 3, GREEDY)
    drafter.start(sequence)
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    for _ in range(4):
        (draft,) = drafter.draft([sequence], [K])
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*sequence.token_ids, *[63] * (K - 1)]])).logits[0, -K:]
        assert draft.ids == logits.argmax(-1).tolist()
        settle(drafter, sequence, draft, 2, 9)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(target).generate([5, 6, 7], params).token_ids
    for other in (DraftTree(folder), Staged(folder), drafter):  # token after token, but for the last
        assert LLM(target, other).generate([5, 6, 7], params).token_ids == plain
    copy = tmp_path / "wrong"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | {"pard_token": 64}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"pard_token.* is 64, but must be a whole number in 0\.\.63"):
        load_draft_model(copy)
