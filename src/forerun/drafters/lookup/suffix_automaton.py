"""A suffix automaton that grows by a token at a time: every string of a text, and what followed it most often.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; for several texts as in Mohri, Moreno,
Weinstein, "General suffix automaton construction algorithm and space bounds", 2009.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

ROOT = 0
_COUNTED_LINKS = 8
"""Suffixes of each new token, from the longest down, whose occurrences are counted; other counts are not updated."""


class SuffixAutomaton:
    """All strings of one or more growing texts, in O(1) amortised a token.

    A state stands for the strings that end at the same positions; its link is the state of their longest suffix that
    ends at more. A text is named by the state of all of it, `ROOT` at first, and texts may grow in turn. Of each
    state's continuations the most frequent is at hand, of equally frequent ones the most recent.

    Most states have one continuation, so the best one is held in arrays and only the branching states have a dict.

    Args:
        counted_links: of each new token's suffixes, from the longest down, this many are counted; text without long
            periods has few, and then every count is exact.
    """

    __slots__ = ("_branches", "_count", "_counted_links", "_length", "_link", "_target", "_token", "num_tokens")

    def __init__(self, counted_links: int = _COUNTED_LINKS) -> None:
        self._counted_links = counted_links
        self._link = array("i", [-1])
        self._length = array("i", [0])
        self._count = array("i", [0])
        self._token = array("i", [-1])
        self._target = array("i", [-1])
        self._branches: dict[int, dict[int, int]] = {}
        self.num_tokens = 0
        """Tokens held: those of all texts, what texts have in common from their beginnings counted once."""

    def __len__(self) -> int:
        """States: at most two for each token, and the root."""
        return len(self._link)

    @property
    def nbytes(self) -> int:
        """Return the bytes held; iterates over the branching states."""
        arrays = (self._link, self._length, self._count, self._token, self._target)
        dicts = (self._branches, *self._branches.values())
        return sum(sys.getsizeof(part) for part in (*arrays, *dicts))

    def add(self, end: int, token: int) -> int:
        """Lengthen the text that ends in state `end`, and return the state in which it ends now."""
        following = self.follow(end, token)
        if following < 0:
            new = self._append(end, token)
            self.num_tokens += 1
        elif self._length[following] == self._length[end] + 1:
            new = following  # another text begins in the same way
        else:
            new = self._split(end, token, following)
            self.num_tokens += 1
        self._count_suffixes(end, token)
        return new

    def follow(self, state: int, token: int) -> int:
        """Return the state of a state's strings with one token more; -1 if they do not occur."""
        if self._token[state] == token:
            return self._target[state]
        branches = self._branches.get(state)
        return -1 if branches is None else branches.get(token, -1)

    def match(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest suffix of a string and one more token that occurs in a text, as its state and length.

        Args:
            state, length: the same of the string itself. It may be from before the automaton grew.
        """
        while state > ROOT and length <= self._length[self._link[state]]:
            state = self._link[state]  # the string's state has been split since
        while (following := self.follow(state, token)) < 0:
            state = self._link[state]
            if state < ROOT:
                return ROOT, 0
            length = self._length[state]
        return following, length + 1

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """Return the longest suffix of a string that something follows, as its state and length; at worst (ROOT, 0)."""
        while state > ROOT and self._target[state] < 0:
            state = self._link[state]
            length = self._length[state]
        return (state, length) if state > ROOT else (ROOT, 0)

    def best(self, state: int) -> tuple[int, int, int, int]:
        """Return the most frequent continuation of a state that has one: its token, the state after it, and how often
        that and the state itself were counted, as far as they were."""
        target = self._target[state]
        count = self._count[target]
        return self._token[state], target, count, max(count, self._count[state])

    def copy(self, state: int, length: int, count: int, min_match: int = 1) -> tuple[list[int], list[int]]:
        """Copy what follows a string, each time by the most frequent continuation; at a text's end its suffixes go on.

        Args:
            state, length: of the string.
            count: tokens at most.
            min_match: a suffix shorter than this is not continued.

        Returns:
            The tokens, and how long the string was that each of them follows.
        """
        token_ids: list[int] = []
        lengths: list[int] = []
        while len(token_ids) < count:
            state, length = self.continued(state, length)
            if length < min_match or state == ROOT:
                break
            token_ids.append(self._token[state])
            lengths.append(length)
            state = self._target[state]
            length += 1
        return token_ids, lengths

    def _append(self, end: int, token: int) -> int:
        """Add a state for a string that has not occurred yet."""
        new = self._new_state(self._length[end] + 1)
        tokens = self._token
        targets = self._target
        links = self._link
        state = end
        while state >= 0:
            if targets[state] < 0:
                tokens[state] = token
                targets[state] = new
            else:
                following = self.follow(state, token)
                if following >= 0:
                    break
                self._set(state, token, new)
            state = links[state]
        if state < 0:
            self._link[new] = ROOT
        elif self._length[following] == self._length[state] + 1:
            self._link[new] = following
        else:
            self._link[new] = self._split(state, token, following)
        return new

    def _split(self, state: int, token: int, following: int) -> int:
        """Split off a state for the strings of `following` that are one token longer than those of `state`."""
        new = self._new_state(self._length[state] + 1)
        for values in (self._link, self._count, self._token, self._target):
            values[new] = values[following]
        if following in self._branches:
            self._branches[new] = self._branches[following].copy()
        self._link[following] = new
        while state >= 0 and self.follow(state, token) == following:
            self._set(state, token, new)
            state = self._link[state]
        return new

    def _count_suffixes(self, end: int, token: int) -> None:
        """Count one more occurrence of every suffix, and update the most frequent continuations."""
        counts = self._count
        tokens = self._token
        targets = self._target
        links = self._link
        state = end
        counted = -1
        for _ in range(self._counted_links):
            if tokens[state] == token:  # most states have no other
                following = targets[state]
                if following != counted:
                    counts[following] += 1
            else:
                following = self._branches[state][token]
                if following != counted:
                    counts[following] += 1
                if counts[following] >= counts[targets[state]]:
                    tokens[state] = token
                    targets[state] = following
            counted = following
            state = links[state]
            if state < 0:
                break

    def _new_state(self, length: int) -> int:
        self._link.append(-1)
        self._length.append(length)
        self._count.append(0)
        self._token.append(-1)
        self._target.append(-1)
        return len(self._link) - 1

    def _set(self, state: int, token: int, target: int) -> None:
        """Set the transition of a token from a state to another."""
        if self._target[state] < 0:
            self._token[state] = token
            self._target[state] = target
            return
        branches = self._branches.get(state)
        if self._token[state] == token:
            self._target[state] = target
        elif branches is None:
            branches = self._branches[state] = {self._token[state]: self._target[state]}
        if branches is not None:
            branches[token] = target


@dataclass(slots=True, eq=False)
class SuffixPosition:
    """A sequence's longest suffix that occurs in some text.

    Attributes:
        text: where.
        state, length: the suffix.
    """

    text: SuffixAutomaton
    state: int = ROOT
    length: int = 0
