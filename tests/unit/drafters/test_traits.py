"""What drafters declare of themselves: options that change the time of a draft are told apart in stored costs."""

from __future__ import annotations

import pytest

from forerun.drafters import DRAFTERS, Binding, DraftModel, DraftTree, EarlyExit, Hybrid, Staged, build_drafter
from forerun.drafters.base import Traits
from forerun.models import load_model, load_tokenizer

VARIANTS = [
    *DRAFTERS,
    "draft-tree:shape=static",
    "draft-tree:drawn=false",
    "draft-tree:width=4",
    "draft-tree:min_gain=0.2",
    "staged:drafter=suffix",
    "staged:drafter=suffix:share=true",
    "staged:drafter=suffix:num_draft_tokens=3",
    "cross-vocab:mode=text",
    "prompt-lookup:min_ngram=1",
    "prompt-lookup:max_ngram=9",
    "rest:continuation=4",
    "rest:num_matches=1",
    "rest:max_places=9",
    "suffix:share=true",
    "lookahead:window=3",
    "lookahead:ngram=4,window=1,guesses=4",
    "lookahead:prompt_pool=false",
    "lookahead:verify_window=true",
    "recycling:width=4",
    "recycling:share=true",
    "recycling:learn_prompt=true",
    "early-exit:exit_layer=2",
    "hybrid:mode=merge",
    "hybrid:sources=suffix+draft-model",
    "hybrid:sources=draft-model+suffix",
    "hybrid:sources=suffix+draft-tree:width=4",
    "hybrid:sources=suffix+draft-tree:width=2",
]


def test_every_option_that_changes_the_time_of_a_draft_has_costs_of_its_own() -> None:
    keys = {text: build_drafter(text)[0].traits.cost_key for text in VARIANTS}
    assert len(set(keys.values())) == len(keys)
    assert all(build_drafter(text)[0].traits.cost_key == key for text, key in keys.items())


def test_wrapped_wrappers_are_told_apart() -> None:
    a, b, c = (build_drafter(name)[0] for name in ("suffix", "prediction", "prompt-lookup"))
    flat, left, right = Hybrid([a, b, c]), Hybrid([Hybrid([a, b]), c]), Hybrid([Hybrid([a]), b, c])
    assert len({each.traits.cost_key for each in (flat, left, right)}) == 3


@pytest.mark.parametrize("make", [DraftModel, DraftTree, Staged])
def test_the_draft_model_is_part_of_the_key(make: type[DraftModel]) -> None:
    tokenizer = load_tokenizer("bundled")
    keys = []
    for dtype in ("float32", "bfloat16"):
        drafter = make("bundled-draft", dtype=dtype)
        drafter.bind(Binding(load_model("bundled-draft", "float32"), tokenizer))
        keys.append(drafter.traits.cost_key)
    assert keys[0] != keys[1] and all("bundled-draft" in " ".join(key) for key in keys)


def test_early_exit_counts_its_layers_when_bound() -> None:
    target = load_model("bundled-draft", "float32")
    keys = []
    for layers in (None, 1):
        drafter = EarlyExit(layers)
        drafter.bind(Binding(target))
        keys.append(drafter.traits.cost_key)
    assert keys[1] == ("EarlyExit", "1 layers") and (keys[0] == keys[1]) == (round(target.num_layers / 4) <= 1)


def test_traits_of_several() -> None:
    parts = [Traits(("a", "b"), 4, reads_prediction=True), Traits(("c",), 7, writes_cache=True)]
    assert Traits.merged("both", parts) == Traits(("both", "(a b)", "(c)"), 7, True, True)
    assert Traits.merged("both", [*parts, Traits(("d",))]).fixed_length_draft is None
    assert Traits.merged("none", []) == Traits(("none",))
