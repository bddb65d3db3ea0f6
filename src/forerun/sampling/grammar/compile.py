"""Grammars compiled for one target's tokens, once each, within limits of size and work, and llguidance's matcher."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forerun.config import Grammar
from forerun.errors import GrammarDeadEndError, GrammarError
from forerun.types import Bits, Matcher, forbid
from forerun.utils import child_program
from forerun.utils.children import CHILDREN, TaskError, TaskLimitError, tokenizer_json
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


_MOST, _MOST_BYTES = 64, 1 << 28
"""Prepared grammars that are kept, those used last, and bytes of all of them."""
_MOST_VERDICTS = 1024
_SECONDS = 2.0
"""Processor time to compile a grammar and to follow it a little: most take a hundredth, and each is compiled twice."""
_REMEDY = "Correct it, or leave it out."
INSTALL = "Install it: pip install 'forerun[grammar]'"
Key: TypeAlias = "tuple[str | None, Grammar]"


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
        self._prepared: OrderedDict[Key, tuple[LLMatcher, int]] = OrderedDict()  # with its bytes
        self._verdicts: OrderedDict[tuple[str | None, bytes], dict[str, Any]] = OrderedDict()

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
            found = self._compile(grammar, tenant)
        with self._lock:
            self._prepared[key] = found
            self._prepared.move_to_end(key)
            while len(self._prepared) > _MOST or sum(nbytes for _, nbytes in self._prepared.values()) > _MOST_BYTES:
                self._prepared.popitem(last=False)
        return partial(self._matcher, found[0])

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

    def _compile(self, grammar: Grammar, tenant: str | None) -> tuple[LLMatcher, int]:
        tokenizer = self._make_tokenizer(_package())
        verdict = self._verdict(grammar, tenant, tokenizer.eos_token)
        try:
            if (reason := verdict.get("refused")) is not None:
                raise ValueError(reason)
            return child_program.compiled(tokenizer, grammar.kind, grammar.text), verdict["nbytes"]
        except ValueError as error:
            raise GrammarError(f"The {grammar.kind} cannot be followed: {said(str(error))}. {_REMEDY}") from None

    def _verdict(self, grammar: Grammar, tenant: str | None, end_id: int) -> dict[str, Any]:
        """Return what `try_grammar` in a child process says of a grammar, unless it was tried before.

        Raises:
            GrammarError: it could not be tried.
        """
        key = (tenant, blake2b(f"{grammar.kind} {grammar.text}".encode(), digest_size=16).digest())
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            arguments = {"num_tokens": self._num_tokens, "end_id": end_id, "kind": grammar.kind}
            text = grammar.text.encode()
            tokenizer = self._hf_tokenizer
            try:
                verdict, _ = CHILDREN.perform("try_grammar", arguments, text, seconds=_SECONDS, tokenizer=tokenizer)
            except TaskLimitError as error:
                verdict = {"refused": f"it {error}"}
            except TaskError as error:
                raise GrammarError(f"The {grammar.kind} could not be tried: {error}. Send it again.") from None
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
