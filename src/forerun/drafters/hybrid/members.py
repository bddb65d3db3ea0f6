"""The base of drafters that consist of other drafters, and merging their drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from forerun.drafters.base import Binding, Drafter, NamedModel, Traits
from forerun.drafters.validation import check_drafter
from forerun.errors import DrafterError, ModelLoadError
from forerun.speculation import DraftOutcome
from forerun.types import Draft, Needs, Pool, Step, Verdict
from forerun.utils.tree import ROOT, Tree


class CompositeDrafter(Drafter):
    """The base of drafters that consist of other drafters.

    Args:
        parts: the drafters, with their names for messages and statistics.

    Raises:
        DrafterError: one of them is no drafter.

    Attributes:
        _kind: the first part of `Traits.cost_key`.
        _name_in_errors: a part in messages, {} standing for its name.
    """

    _kind: str
    _name_in_errors = "The drafter {}"

    def __init__(self, parts: Seq[tuple[str, Drafter]]) -> None:
        for _, drafter in parts:
            check_drafter(drafter)
        self._parts = tuple(parts)

    @property
    def needs(self) -> Needs:
        """Return the union of the parts' needs."""
        needs = Needs()
        for _, drafter in self._parts:
            needs |= drafter.needs
        return needs

    @property
    def traits(self) -> Traits:
        """Return the parts' traits combined."""
        return Traits.merged(self._kind, [drafter.traits for _, drafter in self._parts])

    @property
    def members(self) -> tuple[Drafter, ...]:
        return tuple(member for _, drafter in self._parts for member in drafter.members)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the parts hold together."""
        return sum(drafter.nbytes for _, drafter in self._parts)

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(dict.fromkeys(pool for _, drafter in self._parts for pool in drafter.pools))

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        return tuple(model for _, drafter in self._parts for model in drafter.models_to_load(target_name))

    def bind(self, binding: Binding) -> None:
        """Bind all of them. Raises what the one that cannot be bound raises, with its name."""
        for name, drafter in self._parts:
            try:
                drafter.bind(binding)
            except (DrafterError, ModelLoadError) as error:
                raise type(error)(f"{self._name_in_errors.format(repr(name))} cannot be used: {error}") from error

    def reset(self) -> None:
        for _, drafter in self._parts:
            drafter.reset()


def with_source(name: str, draft: Draft) -> Draft:
    """Return the draft with its drafter's name on every node, unless it has names of its own."""
    return draft if draft.sources else replace(draft, sources=(name,) * len(draft))


@dataclass(frozen=True, slots=True)
class Merged:
    """One tree from several drafts.

    Attributes:
        draft: the tree; chosen, whatever the parts were.
        kept_nodes: for each part, for each of its nodes that stayed: (index in the part, index in the tree).
    """

    draft: Draft
    kept_nodes: list[list[tuple[int, int]]]


def merge(parts: Seq[tuple[str, Draft]], values: Seq[Seq[float]], max_nodes: int) -> Merged:
    """Merge by token prefix; the most probable nodes stay.

    Distributions are dropped: a node that was drawn counts as chosen, which is exact for any tree that is independent
    of the target's randomness.

    Args:
        parts: name and draft of each source.
        values: for each part the probability that each of its nodes is accepted, not rising from a node to its
            children.
        max_nodes: nodes of the tree at most.
    """
    tokens = [part.ids for _, part in parts]
    parents_of = [part.parents for _, part in parts]
    order = [
        (-value, number, node)
        for number, accept_probs in enumerate(values)
        for node, value in enumerate(accept_probs[: parts[number][1].num_candidates])
    ]
    tree = Tree()
    sources: list[str] = []
    accept_probs: list[float] = []
    merged: dict[tuple[int, int], int] = {}
    node_of: list[dict[int, int]] = [{ROOT: ROOT} for _ in parts]
    for value, number, node in sorted(order):
        parent = node_of[number].get(parents_of[number][node])
        if parent is None:
            continue  # its parent did not stay
        token_id = tokens[number][node]
        if (parent, token_id) not in merged:
            if len(tree) == max_nodes:
                continue
            merged[parent, token_id] = tree.add(token_id, parent)
            sources.append(parts[number][0])
            accept_probs.append(-value)
        node_of[number][node] = merged[parent, token_id]
    draft = Draft(tree.ids, tree.parents, sources=tuple(sources), accept_probs=accept_probs)
    return Merged(draft, [sorted((node, at) for node, at in each.items() if node >= 0) for each in node_of])


def remaining_draft(draft: Draft, nodes: Seq[int]) -> Draft:
    """Return the nodes of a draft that stayed, as a draft. nodes: ascending, closed under parents."""
    if list(nodes) == list(range(len(draft))):
        return draft
    part = draft.part(nodes)
    return Draft(part.token_ids, part.parents)


def agreement(draft: Draft, new_ids: Seq[int]) -> tuple[list[int], int]:
    """Compare a draft, verified or not, with the committed tokens.

    Returns:
        The nodes along the committed tokens, root to leaf; and how many of the draft's first nodes are judged by
        them: deeper ones than there are new tokens are not.
    """
    path = draft.follow(new_ids)
    judged = draft.num_candidates
    if len(path) == len(new_ids):
        # a child of the last node would have been the next one, had the step gone on
        end = path[-1] if path else ROOT
        judged = next((node for node in range(judged) if draft.parents[node] == end), judged)
    return path, judged


def without_given(outcome: DraftOutcome, num_given: int) -> DraftOutcome:
    """Return the outcome of what a chain's owner added to the tokens that it was given; of nothing where one of these
    was rejected."""
    count = outcome.num_draft_tokens - num_given
    path = outcome.verdict.path
    if count <= 0 or len(path) < num_given:
        return replace(
            outcome, num_draft_tokens=0, draft=Draft.empty(), verdict=Verdict([], outcome.verdict.next_token)
        )
    own = Draft.chain(outcome.draft.ids[num_given:])
    verdict = Verdict([node - num_given for node in path[num_given:]], outcome.verdict.next_token)
    return replace(outcome, num_draft_tokens=count, draft=own, verdict=verdict)


@dataclass(slots=True, eq=False)
class MemberStep:
    """The drafts of one sequence in a step, kept until the step's verdict.

    Attributes:
        draft: for the engine.
        drafts: source -> requested nodes, its draft.
        owner: the source whose draft it is; None of a merged tree.
        merged: the tree, where several were merged, of the sources in `drafts` in that order.
        num_given: tokens of a copy with which the owner's draft begins.
        copied: the name of the source whose copy that is.
    """

    draft: Draft
    drafts: dict[int, tuple[int, Draft]]
    owner: int | None = None
    merged: Merged | None = None
    num_given: int = 0
    copied: str = ""

    def of(self, draft: Draft | None) -> MemberStep | None:
        """Return the same of a draft that was cut short; None of one that was made of something else."""
        if draft is self.draft:
            return self
        count = 0 if draft is None else len(draft)
        if draft is None or count > len(self.draft) or draft.ids != self.draft.ids[:count]:
            return None
        merged = self.merged
        drafts = self.drafts
        if merged is not None:
            merged = Merged(draft, [[pair for pair in pairs if pair[1] < count] for pairs in merged.kept_nodes])
        elif self.owner is not None:
            drafts = {**drafts, self.owner: (drafts[self.owner][0], drafts[self.owner][1].first(count))}
        return replace(self, draft=draft, drafts=drafts, merged=merged)


def source_step(step: Step, given: MemberStep | None, number: int, all_needs: Needs, needs: Needs) -> Step:
    """Return the step as one source sees it.

    Args:
        given: what the step's draft was made of; None if the hybrid did not make it.
        number: of the source.
        all_needs: of all sources together, which the step was made for.
        needs: of this source.
    """
    if needs == all_needs and step.draft is not None and not len(step.draft):
        return step
    top = None if needs.top_tokens == 0 or step.top_tokens is None else step.top_tokens[:, : needs.top_tokens]
    layers = [all_needs.layers.index(layer) for layer in needs.layers]
    hidden_outputs = None if not layers or step.hidden_outputs is None else step.hidden_outputs[:, layers]
    states = None if not needs.states or step.states is None else step.states[:, layers]
    if step.draft is None or step.verdict is None:
        if not needs.prompt_rows:
            top = hidden_outputs = None
        return Step(step.sequence, None, None, step.num_computed, top, hidden_outputs, states)
    if given is not None and given.owner == number:
        return Step(
            step.sequence, given.drafts[number][1], step.verdict, step.num_computed, top, hidden_outputs, states
        )
    path = step.verdict.path
    draft = Draft.empty()
    ids = step.draft.ids
    new_ids = [*(ids[node] for node in path), step.verdict.next_token]
    part_path: list[int] = []
    rows: list[int] = path
    if given is not None and given.merged is not None and number in given.drafts:
        kept_nodes = given.merged.kept_nodes[list(given.drafts).index(number)]
        draft = remaining_draft(given.drafts[number][1], [node for node, _ in kept_nodes])
        part_path = agreement(draft, new_ids[:-1])[0]
        rows = [at for _, at in kept_nodes]
    verdict = Verdict(part_path, new_ids[len(part_path)] if len(draft) else new_ids[-1])
    n = len(step.draft)
    return Step(
        step.sequence, draft, verdict, step.num_computed, _rows(top, n, rows), _rows(hidden_outputs, n, rows), states
    )


def _rows(values: Tensor | None, num_nodes: int, nodes: Seq[int]) -> Tensor | None:
    """Return the step's rows up to the last committed token's, and those of some nodes."""
    if values is None:
        return None
    first = len(values) - num_nodes
    return values[[*range(first), *(first + node for node in nodes)]]
