"""The drafters that can be tried for a target, and why others cannot: of the table, installed, or named by the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.config import DEFAULT_DRAFTER
from forerun.drafters import Drafter
from forerun.drafters.belonging import belonging
from forerun.drafters.build import automatic_drafter
from forerun.drafters.parse_text import hybrid_of
from forerun.drafters.registry import DRAFTERS
from forerun.drafters.third_party import installed_drafters
from forerun.lab.tune.arms import ArmFailedError, TuningArm

PREDICTION = "prediction"
HYBRID = "hybrid"
CHAIN_K, TREE_K = 4, 16
"""Fixed K of a drafter's first trial, of chains and of trees."""
BEST = 3
"""Drafters for which further arms are made."""
MOST_QUICK = 2
"""Drafters that belong to the target and are tried where time is short."""
_TREES = ("draft-tree", "eagle-tree", "medusa-tree", "recycling", "rest")


def is_tree(text: str) -> bool:
    """Return whether the drafter drafts branching trees."""
    return text.partition(":")[0] in _TREES


def candidates(
    model: str, named: Sequence[str], draft: str | None, bind: Callable[[str], Drafter], *, quick: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Find the drafters for a target.

    Args:
        model: the target's name.
        named: texts of drafters, tried beside the target's default; empty: all that there are.
        draft: a draft model, for whichever drafter takes one.
        bind: returns the drafter of a text, bound to the target. Raises ArmFailedError.
        quick: instead of all only suffix matches, the best that belong to the target, and hybrids of both.

    Returns:
        The texts of the drafters that were bound, the default first, and text or name -> why it is not tried.
    """
    texts = dict.fromkeys([automatic_drafter(model), *named])
    refused = dict[str, str]()
    if not named:
        here = [each.text for each in belonging(model)]
        if quick:
            both = [hybrid_of(DEFAULT_DRAFTER, text) for text in here[:MOST_QUICK]]
            texts |= dict.fromkeys([DEFAULT_DRAFTER, *here[:MOST_QUICK], *both])
        else:
            of_table, refused = _of_table(model, draft)
            texts |= of_table | dict.fromkeys(here)
    for text in texts:
        try:
            bind(text)
        except ArmFailedError as error:
            refused[text] = error.reason
    return [text for text in texts if text not in refused], refused


def first_arms(texts: Sequence[str]) -> list[TuningArm]:
    """Return the arms that are tried first: each drafter with K chosen step by step, then at one fixed K."""
    fixed = [TuningArm(text, TREE_K if is_tree(text) else CHAIN_K) for text in texts]
    return [*map(TuningArm, texts), *fixed]


def further_arms(ranked: Sequence[TuningArm]) -> list[TuningArm]:
    """Return the arms that the first trials suggest: of the best drafters, half and twice the fixed K; hybrids of them;
    and the draft model at 8 bits, which changes no bit of the text. ranked: the fastest first."""
    best = list(dict.fromkeys(arm.drafter for arm in ranked))
    fixed = {text: TREE_K if is_tree(text) else CHAIN_K for text in best[:BEST]}
    arms = [TuningArm(text, each) for text, k in fixed.items() for each in (k // 2, 2 * k)]
    quantized = [f"{text}:quantize=int8" for text in best[:BEST] if text == "draft-model"]
    return [*arms, *map(TuningArm, [*hybrids(best), *quantized])]


def _of_table(model: str, draft: str | None) -> tuple[dict[str, None], dict[str, str]]:
    """Return the texts to be tried, in order, and the rows that are not, with the reason."""
    texts: dict[str, None] = {}
    refused: dict[str, str] = {}
    for name, row in DRAFTERS.items():
        if name == HYBRID:
            continue  # made of those that look promising
        if name == PREDICTION:
            refused[name] = "it reads what a client sends with a request; its references stand for that if it is named"
        elif draft is not None and (text := row.drafting_with(draft)) is not None:
            texts[text] = None
        elif row.serves(model) or row.shipped:  # a head is found by the target's weights
            texts[name] = None
        elif row.with_draft_model is not None:
            refused[name] = "it needs a draft model: --draft MODEL"
        else:
            refused[name] = f"it needs its option {row.needed_option}: --drafters {name}:{row.needed_option}=..."
    for name in installed_drafters():
        texts[name] = None
    return texts, refused


def hybrids(ranked: Sequence[str]) -> list[str]:
    """Return hybrids of the fastest n-gram drafter and the fastest other one, in both modes of merging.

    ranked: drafters, the fastest first.
    """
    plain = [text for text in ranked if ":" not in text or text.partition(":")[0] not in DRAFTERS]
    families = {text: DRAFTERS[text].kind if text in DRAFTERS else "model" for text in plain}
    copying = next((text for text in plain if families[text] == "lookup" and text not in (PREDICTION, "rest")), None)
    other = next((text for text in plain if families[text] in ("model", "head") and not is_tree(text)), None)
    if copying is None or other is None:
        return []
    return [f"{HYBRID}:sources={copying}+{other}", f"{HYBRID}:sources={copying}+{other},mode=merge"]
