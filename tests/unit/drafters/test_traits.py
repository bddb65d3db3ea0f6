"""What drafters declare of themselves: options that change the time of a draft are told apart in stored costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.config import ASSETS, SHIPPED_HEADS
from forerun.drafters import DRAFTERS, Binding, DraftModel, DraftTree, EarlyExit, Hybrid, Staged, build_drafter
from forerun.drafters.base import TRAINING_RECORD, UNKNOWN_ACCEPTANCE, Traits, recorded_acceptance
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


def test_stored_costs_are_found_by_the_names_of_kinds() -> None:
    """Costs that users have stored begin with these names, whatever a class is called or derived from."""
    kinds = {name: build_drafter(name)[0].traits.cost_key[0] for name in DRAFTERS}
    assert kinds == {
        "draft-model": "DraftModel",
        "draft-tree": "DraftTree",
        "staged": "Staged",
        "cross-vocab": "CrossVocab",
        "eagle": "Eagle",
        "eagle-tree": "EagleTree",
        "block": "Block",
        "medusa": "Medusa",
        "medusa-tree": "MedusaTree",
        "mtp": "Mtp",
        "prompt-lookup": "PromptLookup",
        "rest": "Rest",
        "suffix": "Suffix",
        "lookahead": "Lookahead",
        "recycling": "Recycling",
        "early-exit": "EarlyExit",
        "prediction": "Prediction",
        "hybrid": "Hybrid first",
    }

    class Renamed(DraftModel):
        pass

    assert Renamed().traits.cost_key == DraftModel().traits.cost_key


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


@pytest.mark.parametrize(
    "text", ["eagle", "eagle-tree", "block", "medusa", "draft-model", "draft-tree", "staged", "cross-vocab"]
)
def test_drafters_tell_what_the_record_of_their_head_or_draft_model_says(text: str) -> None:
    drafter, _ = build_drafter(text)
    assert drafter.traits.acceptance == UNKNOWN_ACCEPTANCE
    drafter.bind(Binding(load_model("bundled"), load_tokenizer("bundled")))
    greedy, drawn = drafter.traits.acceptance
    assert len(greedy) >= 3 <= len(drawn) and all(0 < each < 1 for each in greedy + drawn)


def test_every_shipped_record_has_what_was_measured_with_drafts() -> None:
    drafts = [ASSETS / "draft", ASSETS / "draft-other-vocab"]
    for folder in (*SHIPPED_HEADS.glob("*/*"), *drafts):
        rows = json.loads((folder / TRAINING_RECORD).read_text())["measured"]
        assert recorded_acceptance(folder) == tuple(
            tuple(next(row for row in rows if row["temperature"] == temperature)["per_position"])
            for temperature in (0, 1)
        )


ROWS = [{"temperature": t, "per_position": p} for t, p in ((1, [0.5]), (0.0, [1, 0.2]), (0, [0.1]), (0.7, [0.3]))]
SCORES = {"per_position": [0.4], "overlap_at_temperature_1": [0.3]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"acceptance": ROWS, "held_out": SCORES}, ((1.0, 0.2), (0.5,))),
        ({"acceptance": ROWS[:1], "held_out": SCORES}, ((), (0.5,))),
        ({"measured": ROWS[1:3], "acceptance": ROWS, "held_out": SCORES}, ((1.0, 0.2), ())),
        ({"measured": [], "acceptance": [], "held_out": SCORES}, ((0.4,), (0.3,))),
        ({"held_out": SCORES | {"per_position_at_temperature_1": [0.35]}}, ((0.4,), (0.35,))),
        ({"held_out": {"per_position": None, "overlap_at_temperature_1": [0.3]}}, ((), (0.3,))),
        ({"acceptance": [], "held_out": {"bits_per_byte": 1.2}}, UNKNOWN_ACCEPTANCE),
        ({}, UNKNOWN_ACCEPTANCE),
        *(
            ({"acceptance": wrong, "held_out": SCORES}, UNKNOWN_ACCEPTANCE)
            for wrong in (
                0.5,
                "high",
                [0.5],
                [{"per_position": [0.5]}],
                [{"temperature": -1, "per_position": [0.5]}],
                *([*ROWS, {"temperature": 0, "per_position": values}] for values in ([1.01], [-0.1], [True], 0.5)),
                [*ROWS, {"temperature": 0, "per_position": [float("nan")]}],
            )
        ),
        ({"held_out": 3}, UNKNOWN_ACCEPTANCE),
        ([], UNKNOWN_ACCEPTANCE),
    ],
)
def test_the_record_is_read_strictly_and_never_refused(record: object, expected: object, tmp_path: Path) -> None:
    (tmp_path / TRAINING_RECORD).write_text(json.dumps(record))
    assert recorded_acceptance(tmp_path) == expected


def test_without_a_readable_record_acceptance_is_unknown(tmp_path: Path) -> None:
    assert recorded_acceptance(tmp_path) == recorded_acceptance(tmp_path / "gone") == UNKNOWN_ACCEPTANCE
    (tmp_path / TRAINING_RECORD).write_bytes(b"\xff{")
    assert recorded_acceptance(tmp_path) == UNKNOWN_ACCEPTANCE
    (tmp_path / "model.gguf").write_bytes(b"")
    assert recorded_acceptance(tmp_path / "model.gguf") == UNKNOWN_ACCEPTANCE
