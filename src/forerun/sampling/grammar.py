"""Grammars: compiled once for one target's tokens, followed along a sequence and its drafts, and their mask on logits.

Exactness does not depend on what a grammar does to drafts: tokens that it forces are proposed, tokens that it refuses
are not verified. The decision on a drawn draft depends on the sequence's tokens alone, or concerns nodes below one that
the grammar refuses, which no rule accepts.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence as Seq
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from time import thread_time
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from forerun.config import JSON_SCHEMA, Grammar
from forerun.errors import GrammarDeadEndError, GrammarError
from forerun.sampling.json_schemas import Unheld, readable_text, remedy, unheld
from forerun.types import Allowed, Bits, Draft, Matcher, Sequence, allow, forbid, is_allowed
from forerun.utils import child_program
from forerun.utils.children import CHILDREN, TaskError, TaskLimitError, tokenizer_json
from forerun.utils.tree import ROOT, Tree
from forerun.utils.vocabulary import added_tokens, special_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST = 64
_MOST_BYTES = 1 << 28
"""Prepared grammars that are kept, those used last, and bytes of all of them."""
_MOST_VERDICTS = 1024
_SECONDS = 2.0
"""Processor time to compile a grammar twice and to follow it a little: most take a hundredth."""
INSTALL = "Install it: pip install 'forerun[grammar]'"
Key: TypeAlias = "tuple[str | None, Grammar]"
_FOLLOWING = 1.0
_FOLLOWING_POSITION = 0.02
"""Processor time that a grammar may take, and for each position: most take a hundredth, and one that takes more holds
up everybody's steps."""
DeadRows: TypeAlias = dict[int, GrammarDeadEndError]
"""Rows from which no token can be drawn, and why."""
SOURCE = "grammar"
"""The source of forced tokens, in statistics."""
_DRAFTER = "drafter"
"""Of the drafter's tokens beside them, where the drafter gives no name."""


class GuidanceMatcher:
    """A position in a text under a grammar (`forerun.types.Matcher`), by llguidance.

    llguidance recovers from a token that it refuses in `try_consume_tokens`, and not in `consume_tokens`. It never gets
    end tokens: it would not count them among the tokens that `rollback` undoes.

    Args:
        matcher: this one's alone.
        end_id: stands for the end of the text.
    """

    def __init__(self, matcher: LLMatcher, end_id: int) -> None:
        self._matcher = matcher
        self._end_id = end_id

    def accept(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def undo(self, count: int) -> bool:
        return not self._matcher.is_error() and self._matcher.rollback(count)

    def allowed(self) -> tuple[Bits, bool]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():
            raise GrammarDeadEndError(f"The grammar cannot be followed further: {self.error}. Write it in another way.")
        forbid(bits, self._end_id)
        return bits, self._matcher.is_accepting()

    @property
    def error(self) -> str:
        """Return why the matcher is of no further use; empty if it is usable."""
        return said(self._matcher.get_error())

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()


def said(message: str) -> str:
    """Return llguidance's message in one line, without the parser's state."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300].rstrip(" .;")


class _Prepared(NamedTuple):
    """A compiled grammar, the bytes of memory that it takes, and what of it is not held."""

    matcher: LLMatcher
    nbytes: int
    unheld: Unheld


class Grammars:
    """The compiled grammars of one target's requests. May be called from any thread.

    A grammar is tried in a child process before it is compiled in this one, which nothing could interrupt.

    The request decides which tokens end an output: llguidance's own end token is never read.

    Args:
        tokenizer: the target's; None if it has none.
        name: of the target, for messages.
        vocab_size: width of its logits. Ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: Any, name: str, vocab_size: int) -> None:
        self._hf_tokenizer = tokenizer
        self._name = name
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prepared: OrderedDict[Key, _Prepared] = OrderedDict()
        self._verdicts: OrderedDict[tuple[str | None, bytes], dict[str, Any]] = OrderedDict()

    def prepare(self, grammar: Grammar, tenant: str | None = None) -> Callable[[], Matcher]:
        """Compile a grammar. Return a function that makes matchers of it, at their beginning.

        Args:
            tenant: whose it is; nobody learns from the time that this takes which grammars other tenants use.

        Raises:
            GrammarError: it is invalid, takes too much work, or allows nothing; the target's tokenizer does not serve;
                or llguidance is not installed.
        """
        return partial(self._matcher, self._find(grammar, tenant).matcher)

    def unheld(self, grammar: Grammar, tenant: str | None = None) -> Unheld:
        """Return what of a grammar is not held while an answer is generated. Arguments and errors as `prepare`."""
        return self._find(grammar, tenant).unheld

    def _find(self, grammar: Grammar, tenant: str | None) -> _Prepared:
        key = (tenant, grammar)
        with self._lock:
            found = self._prepared.get(key)
        if found is None:
            found = self._compile(grammar, tenant)
        with self._lock:
            self._prepared[key] = found
            self._prepared.move_to_end(key)
            while len(self._prepared) > _MOST or sum(each.nbytes for each in self._prepared.values()) > _MOST_BYTES:
                self._prepared.popitem(last=False)
        return found

    def special(self) -> dict[str, int]:
        """Return text -> id of the tokens that are no text to a grammar.

        Beside the special ones these are all added tokens of the form <...>, which llguidance takes for special.

        Raises:
            GrammarError: the target's tokenizer does not serve, or llguidance is not installed.
        """
        is_special = self._make_tokenizer(_package()).is_special_token
        return {text: index for index, text in added_tokens(self._hf_tokenizer).items() if is_special(index)}

    def _matcher(self, compiled: LLMatcher) -> GuidanceMatcher:
        with self._lock:
            assert self._tokenizer is not None
            return GuidanceMatcher(compiled.deep_copy(), self._tokenizer.eos_token)

    def _compile(self, grammar: Grammar, tenant: str | None) -> _Prepared:
        tokenizer = self._make_tokenizer(_package())
        text = grammar.text
        warnings = grammar.warnings
        if grammar.kind == JSON_SCHEMA:
            text, warnings = readable_text(text)
        verdict = self._verdict(grammar.kind, text, tenant, tokenizer.eos_token)
        try:
            if (reason := verdict.get("refused")) is not None:
                raise ValueError(reason)
            matcher = child_program.compiled(tokenizer, grammar.kind, text)
        except ValueError as error:
            reason = said(str(error))
            raise GrammarError(f"The {grammar.kind} cannot be followed: {reason}. {remedy(reason)}") from None
        more = unheld(matcher.get_grammar_warnings(), grammar.text if grammar.kind == JSON_SCHEMA else "")
        return _Prepared(matcher, verdict["nbytes"], Unheld((*warnings, *more.warnings), more.schema))

    def _verdict(self, kind: str, text: str, tenant: str | None, end_id: int) -> dict[str, Any]:
        """Return what `try_grammar` in a child process says of a grammar, unless it was tried before.

        Raises:
            GrammarError: it could not be tried.
        """
        key = (tenant, blake2b(f"{kind} {text}".encode(), digest_size=16).digest())
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            arguments = {"num_tokens": self._num_tokens, "end_id": end_id, "kind": kind}
            blob = text.encode()
            tokenizer = self._hf_tokenizer
            try:
                verdict, _ = CHILDREN.perform("try_grammar", arguments, blob, seconds=_SECONDS, tokenizer=tokenizer)
                if verdict.get("seconds", 0) > _SECONDS:
                    raise TaskLimitError(f"takes more than {_SECONDS:.3g} s of processor time")
            except TaskLimitError as error:
                verdict = {"refused": f"it {error}"}
            except TaskError as error:
                raise GrammarError(f"The {kind} could not be tried: {error}. Send it again.") from None
        with self._lock:
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            while len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    @property
    def _num_tokens(self) -> int:
        return max(self._vocab_size, len(self._hf_tokenizer))

    def get_ready(self) -> None:
        """Make llguidance's view of the tokenizer, if it serves: it holds the interpreter for a second."""
        with suppress(GrammarError):
            self._make_tokenizer(_package())

    def _make_tokenizer(self, package: ModuleType) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer(package)
            return self._tokenizer

    def _read_tokenizer(self, package: ModuleType) -> LLTokenizer:
        tokenizer = self._hf_tokenizer
        if tokenizer is None:
            raise GrammarError(f"{self._name} has no tokenizer, so there is no text that a grammar could hold to.")
        special = sorted(special_tokens(tokenizer).values())
        if not special:
            raise GrammarError(f"The tokenizer of {self._name} has no special token that could end a text.")
        end_id = special[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        try:
            content = tokenizer_json(tokenizer)[1].decode()
            made: LLTokenizer = package.LLTokenizer(content, n_vocab=self._num_tokens, eos_token=end_id)
            return made
        except Exception as error:
            raise GrammarError(
                f"The tokenizer of {self._name} cannot be used with grammars: {said(str(error))}. Take one of "
                "the tokenizers library."
            ) from None


def _package() -> ModuleType:
    """Import llguidance. Raises GrammarError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError(
            f"A grammar needs the package llguidance, which cannot be imported: {error}. {INSTALL}."
        ) from None
    return llguidance


class SequenceConstraint:
    """Runs a matcher along the sequence's tokens, and along paths after them.

    The matcher is moved from one position to the next by undoing tokens and accepting others. Its position follows from
    tokens alone, so that an undone step needs nothing: the matcher is moved, or made again, at the next call.

    Args:
        new_matcher: makes a matcher that has seen nothing.
        end_ids: tokens that end the output. They may follow where the text may end.
        vocab_size: V.
    """

    def __init__(self, new_matcher: Callable[[], Matcher], end_ids: Iterable[int], vocab_size: int) -> None:
        self._new_matcher = new_matcher
        self._end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        self._matcher: Matcher | None = None  # None: it has to be made again
        self._committed = 0  # the output's tokens, as many as were there at the last call
        self._given: list[int] = []  # the tokens that the matcher has taken, committed ones and those after them
        self._refused: GrammarDeadEndError | None = None  # of a committed token
        self._memory: dict[tuple[int, ...], Allowed] = {}  # path after the committed tokens -> what may follow
        self._seconds = 0.0
        self._positions = 0

    def allowed(self, sequence: Sequence, paths: Seq[Seq[int]]) -> list[Allowed]:
        self._follow(sequence)
        return [self._after(sequence, tuple(path)) for path in paths]

    def viable(self, sequence: Sequence, tree: Tree) -> list[bool]:
        self._follow(sequence)
        if self._refused is not None:
            return [False] * len(tree)
        found: list[bool] = []
        ended: list[bool] = []
        paths: list[list[int]] = []
        for token_id, parent in zip(tree.ids, tree.parents, strict=True):
            above = paths[parent] if parent >= 0 else []
            ends = token_id in self._end_ids
            possible = parent < 0 or (found[parent] and not ended[parent])
            if possible and ends:
                bits = self._after(sequence, tuple(above))
                possible = isinstance(bits, np.ndarray) and is_allowed(bits, token_id)
            elif possible:
                possible = self._move(sequence, [*above, token_id])
            found.append(possible)
            ended.append(ends)
            paths.append([*above, token_id])
        return found

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        self._follow(sequence)
        if limit <= 0 or self._refused is not None or not self._move(sequence, []):
            return []
        assert self._matcher is not None
        path = self._matcher.forced()[:limit]
        while len(path) < limit:
            token_id = _only(self._after(sequence, tuple(path)))
            if token_id is None:
                break
            path.append(token_id)
        return path

    def _follow(self, sequence: Sequence) -> None:
        """Add the tokens that were committed since the last call to the committed tokens."""
        length = sequence.num_output
        if length == self._committed:
            return
        new = sequence.token_ids[sequence.num_prompt + self._committed :]
        self._memory.clear()
        if self._refused is None and self._matcher is not None and not self._move(sequence, new):
            self._refused = _refusal()
        self._committed = length

    def _move(self, sequence: Sequence, path: Seq[int]) -> bool:
        """Move the matcher to the end of this path after the committed tokens. Return False if it refuses one of the
        path's.

        It then stands as far as it came. An interrupt leaves no matcher.
        """
        matcher = self._matcher
        self._matcher = None
        started = thread_time()
        if matcher is None:
            matcher = self._new_matcher()
            first = sequence.num_prompt
            self._given = sequence.token_ids[first : first + self._committed]
            if not all(map(matcher.accept, self._given)):
                self._refused = _refusal()
                return False
        ahead = self._given[self._committed :]
        common = 0
        while common < min(len(ahead), len(path)) and ahead[common] == path[common]:
            common += 1
        if common < len(ahead) and not matcher.undo(len(ahead) - common):
            return self._move(sequence, path)
        count = common
        while count < len(path) and matcher.accept(path[count]):
            count += 1
        self._given[self._committed + common :] = path[common:count]
        self._matcher = matcher
        self._seconds += thread_time() - started
        return count == len(path)

    def _after(self, sequence: Sequence, path: tuple[int, ...]) -> Allowed:
        if self._refused is not None:
            return self._refused
        if path not in self._memory:
            self._memory[path] = self._ask(sequence, path)
        return self._memory[path]

    def _ask(self, sequence: Sequence, path: tuple[int, ...]) -> Allowed:
        if not self._end_ids.isdisjoint(path):
            return None
        if not self._move(sequence, path):
            return _refusal()
        matcher = self._matcher
        self._matcher = None
        assert matcher is not None
        started = thread_time()
        try:
            bits, may_end = matcher.allowed()
        except GrammarDeadEndError as error:
            return error
        self._seconds += thread_time() - started
        self._positions += 1
        self._matcher = matcher
        if self._seconds > _FOLLOWING + _FOLLOWING_POSITION * self._positions:
            return GrammarDeadEndError(
                f"The grammar takes too long to follow: {self._seconds:.1f} s of processor time for {self._positions} "
                "positions. Make it less ambiguous, or simpler."
            )
        if may_end:
            allow(bits, sorted(self._end_ids))
        return bits if bits.any() else no_token()


def mask_logits(logits: Tensor, allowed: Seq[Allowed]) -> DeadRows:
    """Change [R, V] logits in place, and return the rows for which there is an error. allowed: [R]."""
    rows = [row for row, bits in enumerate(allowed) if isinstance(bits, np.ndarray)]
    if rows:
        packed = np.stack([bits for bits in allowed if isinstance(bits, np.ndarray)])
        unpacked = np.unpackbits(packed, axis=-1, count=logits.shape[-1], bitorder="little")
        mask = torch.from_numpy(unpacked).to(logits.device) == 0
        if len(rows) == len(allowed):
            logits.masked_fill_(mask, -math.inf)
        else:
            logits[rows] = logits[rows].masked_fill_(mask, -math.inf)
    return {row: error for row, error in enumerate(allowed) if isinstance(error, GrammarDeadEndError)}


def no_token(what: str = "The grammar allows") -> GrammarDeadEndError:
    """Make the error of a position where a grammar, or lists of tokens, allow no token."""
    return GrammarDeadEndError(
        f"{what} no token here together with the request's other options, and the text is not complete. "
        "If min_tokens or ignore_eos is set, leave it out; else allow more."
    )


def _only(bits: Allowed) -> int | None:
    """Return the token that alone may follow; None if there are more, or none."""
    if not isinstance(bits, np.ndarray) or np.count_nonzero(bits) != 1:
        return None
    at = int(bits.argmax())
    byte = int(bits[at])
    return 8 * at + byte.bit_length() - 1 if byte.bit_count() == 1 else None


def _refusal() -> GrammarDeadEndError:
    return GrammarDeadEndError(
        "The grammar refuses a token that it had allowed, which is a fault of the library that follows it. Send the "
        "request again with another seed, or write the grammar in another way."
    )


def forced_tokens(sequences: Seq[Sequence], num_draft_tokens: Seq[int]) -> list[list[int]]:
    """Return [B] the tokens that each sequence's grammar forces, at most `num_draft_tokens` and those that fit."""
    return [
        [] if sequence.constraint is None or k == 0 else sequence.constraint.forced(sequence, min(k, sequence.room))
        for sequence, k in zip(sequences, num_draft_tokens, strict=True)
    ]


def with_grammar(sequence: Sequence, forced: Seq[int], draft: Draft, num_draft_tokens: int) -> Draft:
    """Combine the forced tokens with the drafter's that the grammar accepts.

    A draft that was drawn, or whose rows the drafter uses beside their acceptance, is not merged. A
    drawn draft is taken; otherwise, the longer of forced tokens and draft.

    Args:
        forced: tokens, at most `num_draft_tokens`.
        draft: the drafter's; empty if it was not called.
    """
    chain = Draft(list(forced), list(range(-1, len(forced) - 1)), sources=(SOURCE,) * len(forced))
    if not len(draft):
        return chain
    if draft.hidden is not None or draft.num_candidates < len(draft):
        depth = max(draft.depths[: draft.num_candidates], default=0)
        return chain if draft.probs is None and len(forced) > depth else draft
    draft = _viable(sequence, draft)
    if draft.probs is not None or not forced:
        return draft
    tree = Tree()
    tree.graft(forced, num_draft_tokens)
    sources = [SOURCE] * len(tree)
    merged = {ROOT: ROOT}
    children = {key: node for node, key in enumerate(zip(tree.parents, tree.ids, strict=True))}
    for node, (token_id, parent) in enumerate(zip(draft.ids, draft.parents, strict=True)):
        above = merged.get(parent)
        if above is None:
            continue
        found = children.get((above, token_id))
        if found is None:
            if len(tree) == num_draft_tokens:
                continue
            found = children[above, token_id] = tree.add(token_id, above)
            sources.append(draft.sources[node] if draft.sources else _DRAFTER)
        merged[node] = found
    return Draft(tree.ids, tree.parents, sources=tuple(sources))


def _viable(sequence: Sequence, draft: Draft) -> Draft:
    """Return the draft without nodes that the grammar refuses. Of a drawn draft they stay, without those below: their
    draw was looked at."""
    constraint = sequence.constraint
    assert constraint is not None
    viable = constraint.viable(sequence, draft)
    if all(viable):
        return draft
    if draft.probs is None:
        nodes = [node for node, possible in enumerate(viable) if possible]
    else:
        nodes = [node for node, parent in enumerate(draft.parents) if parent == ROOT or viable[parent]]
    return draft.part(nodes)
