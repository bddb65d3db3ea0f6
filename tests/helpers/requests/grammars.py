"""Grammars without a text: finite automata over tokens, with faults where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun import Grammar
from forerun.errors import GrammarDeadEndError
from forerun.sampling.json_schemas import ALL_HELD, Unheld
from forerun.types import Bits, Matcher, allow

ANY = Grammar.regex("anything")
"""For requests to an engine whose grammars are automata."""


@dataclass
class Automaton:
    """Where each token leads. State 0 is the beginning.

    Attributes:
        edges: state -> token -> state.
        ends: states in which the text may end.
        refused: (state, token) that is offered and then refused.
        broken: states of which nothing can be told.
        vocab_size: V.
    """

    edges: Mapping[int, Mapping[int, int]]
    ends: frozenset[int]
    vocab_size: int
    refused: frozenset[tuple[int, int]] = frozenset()
    broken: frozenset[int] = frozenset()
    num_made: int = 0

    def matcher(self) -> AutomatonMatcher:
        self.num_made += 1
        return AutomatonMatcher(self)

    def prepare(self, grammar: Grammar, tenant: str | None = None) -> Callable[[], Matcher]:
        """As `Grammars.prepare`, of every grammar."""
        return self.matcher

    def unheld(self, grammar: Grammar, tenant: str | None = None) -> Unheld:
        """As `Grammars.unheld`, of every grammar."""
        return ALL_HELD

    def state_after(self, token_ids: Seq[int]) -> int | None:
        state: int | None = 0
        for token_id in token_ids:
            state = None if state is None else self.edges[state].get(token_id)
        return state

    def accepts(self, token_ids: Seq[int]) -> bool:
        return self.state_after(token_ids) in self.ends


@dataclass
class AutomatonMatcher:
    automaton: Automaton
    states: list[int] = field(default_factory=lambda: [0])
    dead: bool = False

    def accept(self, token_id: int) -> bool:
        state = self.states[-1]
        if self.dead or (state, token_id) in self.automaton.refused:
            return False
        following = self.automaton.edges[state].get(token_id)
        if following is None:
            return False
        self.states.append(following)
        return True

    def undo(self, count: int) -> bool:
        assert 0 < count < len(self.states)
        if self.dead:
            return False
        del self.states[-count:]
        return True

    def allowed(self) -> tuple[Bits, bool]:
        assert not self.dead
        state = self.states[-1]
        if state in self.automaton.broken:
            self.dead = True
            raise GrammarDeadEndError("broken")
        bits = np.zeros(-(-self.automaton.vocab_size // 8), dtype=np.uint8)
        allow(bits, self.automaton.edges[state])
        return bits, state in self.automaton.ends

    def forced(self) -> list[int]:
        state, found = self.states[-1], list[int]()
        while state not in self.automaton.ends and len(self.automaton.edges[state]) == 1 and len(found) < 8:
            ((token_id, state),) = self.automaton.edges[state].items()
            found.append(token_id)
        return found


def random_automaton(
    seed: int, vocab_size: int, num_states: int = 6, end_id: int = 0, density: float = 0.5
) -> Automaton:
    """Every state has a way on; token `end_id` leads nowhere. The first states have one way only."""
    rng = np.random.default_rng(seed)
    edges: dict[int, dict[int, int]] = {}
    for state in range(num_states):
        tokens = [token for token in range(vocab_size) if token != end_id and rng.random() < density]
        if state < 2 or not tokens:
            tokens = [int(rng.choice([token for token in range(vocab_size) if token != end_id]))]
        edges[state] = {token: int(rng.integers(0, num_states)) for token in tokens}
    edges[0] = dict.fromkeys(edges[0], 1)
    edges[1] = dict.fromkeys(edges[1], 2)
    ends = frozenset(state for state in range(2, num_states) if rng.random() < 0.3)
    return Automaton(edges, ends, vocab_size)
