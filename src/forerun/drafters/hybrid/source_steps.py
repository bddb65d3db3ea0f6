"""What each source of a hybrid is told of a step: the part of the draft that was its, and the rows it needs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from forerun.drafters.hybrid.merging import Merged, agreement, kept
from forerun.types import Draft, Needs, Step, Verdict


@dataclass(slots=True, eq=False)
class Given:
    """What one sequence was given in a step, until the step's verdict.

    Attributes:
        draft: for the engine.
        asked: source -> nodes asked for, its draft.
        owner: the source whose draft it is; None of a merged tree.
        merged: the tree, where several were merged, of the sources in `asked` in that order.
    """

    draft: Draft
    asked: dict[int, tuple[int, Draft]]
    owner: int | None = None
    merged: Merged | None = None


def source_step(step: Step, given: Given | None, number: int, all_needs: Needs, needs: Needs) -> Step:
    """The step as one source sees it.

    Args:
        given: what the step's draft was made of; None if the hybrid did not make it.
        number: of the source.
        all_needs: of all sources together, which the step was made for.
        needs: of this source.
    """
    top = None if needs.top_tokens == 0 or step.top_tokens is None else step.top_tokens[:, : needs.top_tokens]
    layers = [all_needs.layers.index(layer) for layer in needs.layers]
    taps = None if not layers or step.taps is None else step.taps[:, layers]
    states = None if not needs.states or step.states is None else step.states[:, layers]
    if step.draft is None or step.verdict is None:
        if not needs.prompt_rows:
            top = taps = None
        return Step(step.sequence, None, None, step.num_computed, top, taps, states)
    if given is not None and given.owner == number:
        return Step(step.sequence, given.asked[number][1], step.verdict, step.num_computed, top, taps, states)
    path, draft = step.verdict.path, Draft.empty()
    ids = step.draft.ids
    new_ids = [*(ids[node] for node in path), step.verdict.next_token]
    part_path: list[int] = []
    rows: list[int] = path
    if given is not None and given.merged is not None and number in given.asked:
        places = given.merged.places[list(given.asked).index(number)]
        draft = kept(given.asked[number][1], [node for node, _ in places])
        part_path = agreement(draft, new_ids[:-1])[0]
        rows = [at for _, at in places]
    verdict = Verdict(part_path, new_ids[len(part_path)] if len(draft) else new_ids[-1])
    n = len(step.draft)
    return Step(step.sequence, draft, verdict, step.num_computed, _rows(top, n, rows), _rows(taps, n, rows), states)


def _rows(values: Tensor | None, num_nodes: int, nodes: Seq[int]) -> Tensor | None:
    """Of the step's rows those up to the last committed token's, and those of some nodes."""
    if values is None:
        return None
    first = len(values) - num_nodes
    return values[[*range(first), *(first + node for node in nodes)]]
