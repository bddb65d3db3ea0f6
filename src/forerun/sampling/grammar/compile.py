"""Grammars compiled for one target's tokens, once each, within limits of size and work, and llguidance's matcher."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.config import JSON_OBJECT, JSON_SCHEMA, REGEX, Grammar
from forerun.errors import GrammarDeadEndError, GrammarError
from forerun.types import Bits, Matcher, forbid
from forerun.utils.vocabulary import added_tokens, special_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GuidanceMatcher:
    """A position in a text under a grammar (`forerun.types.Matcher`), by llguidance.

    llguidance recovers from a token that it refuses in `try_consume_tokens`, and not in `consume_tokens`. It never gets
    end tokens: it would not count them among the tokens that `rollback` undoes.

    Args:
        matcher: this one's alone.
        end_id: stands for the end of the text.
    """

    def __init__(self, matcher: LLMatcher, end_id: int) -> None:
        self._matcher, self._end_id = matcher, end_id

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


_MOST = 64
"""Prepared grammars that are kept, those used last."""
_FIRST_STEPS = 64
"""First tokens that are tried when a grammar is prepared."""
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as Python's json.dumps writes it: blanks that may be left out or doubled would have to be drawn."""
_REMEDY = "Correct it, or leave it out."
INSTALL = "Install it: pip install 'forerun[grammar]'"


class Grammars:
    """The compiled grammars of one target's requests. May be called from any thread.

    The request decides which tokens end an output: llguidance's own end token is never read.

    Args:
        tokenizer: the target's; None if it has none.
        name: of the target, for messages.
        vocab_size: width of its logits. Ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: Any, name: str, vocab_size: int) -> None:
        self._hf_tokenizer, self._name, self._vocab_size = tokenizer, name, vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prepared: OrderedDict[tuple[str | None, Grammar], LLMatcher] = OrderedDict()

    def prepare(self, grammar: Grammar, tenant: str | None = None) -> Callable[[], Matcher]:
        """Compile a grammar. Return a function that makes matchers of it, at their beginning.

        Args:
            tenant: whose it is; nobody learns from the time that this takes which grammars other tenants use.

        Raises:
            GrammarError: it is invalid, takes too much work, or allows nothing; the target's tokenizer does not serve;
                or llguidance is not installed.
        """
        key = (tenant, grammar)
        with self._lock:
            found = self._prepared.get(key)
        if found is None:
            found = self._compile(grammar)
        with self._lock:
            self._prepared[key] = found
            self._prepared.move_to_end(key)
            while len(self._prepared) > _MOST:
                self._prepared.popitem(last=False)
        return partial(self._matcher, found)

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

    def _compile(self, grammar: Grammar) -> LLMatcher:
        package = _package()
        tokenizer = self._make_tokenizer(package)
        limits = package.LLParserLimits(verbose_errors=False)
        try:
            compiled: LLMatcher = package.LLMatcher(tokenizer, _source(package, grammar), log_level=0, limits=limits)
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        if compiled.is_error():
            raise _refused(grammar, compiled.get_error())
        self._try(grammar, compiled)
        return compiled

    def _try(self, grammar: Grammar, compiled: LLMatcher) -> None:
        """Take first steps into the text: what exceeds a limit does so there. Raises GrammarError."""
        try:
            bits, may_end = self._matcher(compiled).allowed()
            first = np.flatnonzero(np.unpackbits(bits, bitorder="little"))[:_FIRST_STEPS].tolist()
            if not first and not may_end:
                raise _refused(grammar, "it allows no text at all")
            for token_id in first:
                matcher = self._matcher(compiled)
                if not matcher.accept(token_id):
                    raise _refused(grammar, matcher.error or "what it allows is refused")
            matcher = self._matcher(compiled)
            if all(map(matcher.accept, matcher.forced())):
                matcher.allowed()
        except GrammarDeadEndError as error:
            raise _refused(grammar, str(error)) from None

    def _make_tokenizer(self, package: ModuleType) -> LLTokenizer:
        """Return llguidance's view of the tokenizer, which takes up to a second to make."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer(package)
            return self._tokenizer

    def _read_tokenizer(self, package: ModuleType) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        tokenizer = self._hf_tokenizer
        if tokenizer is None:
            raise GrammarError(f"{self._name} has no tokenizer, so there is no text that a grammar could hold to.")
        special = sorted(special_tokens(tokenizer).values())
        if not special:
            raise GrammarError(f"The tokenizer of {self._name} has no special token that could end a text.")
        end_id = special[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        try:
            return from_tokenizer(tokenizer, n_vocab=max(self._vocab_size, len(tokenizer)), eos_token=end_id)
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


def _refused(grammar: Grammar, reason: str) -> GrammarError:
    return GrammarError(f"The {grammar.kind} cannot be followed: {said(reason)}. {_REMEDY}")


def _source(package: ModuleType, grammar: Grammar) -> str:
    """Return the grammar as llguidance takes it. Raises ValueError."""
    make = package.LLMatcher
    if grammar.kind == JSON_OBJECT:
        return str(make.grammar_from_json_schema({"type": "object"}, defaults=_JSON))
    if grammar.kind == JSON_SCHEMA:
        return str(make.grammar_from_json_schema(grammar.text, defaults=_JSON))
    return str((make.grammar_from_regex if grammar.kind == REGEX else make.grammar_from_lark)(grammar.text))
