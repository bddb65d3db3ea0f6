"""Incremental detokenisation, and stop strings across the borders of tokens.

The text of an answer is what decoding prompt and answer adds to decoding the prompt. It is decoded token by token, and
what a token adds depends on the tokens before it alone: so streamed text, the whole answer's, and the text of any other
division into steps are the same.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence as Seq
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from types import MappingProxyType
from typing import Any

from forerun.utils.vocabulary import special_tokens

_REPLACEMENT = "\ufffd"
_PROMPT_CONTEXT = 8
"""Prompt tokens decoded along: no character has as many, so that one begun in the prompt is found."""
_MAX_PENDING = 16
"""Tokens decoded together at most, while they end in what may be part of a character."""
_MAX_CACHED = 2**14
NO_MARKS: Mapping[int, str] = MappingProxyType({})


class TokenTexts:
    """The texts that the tokens of one tokenizer add to a text.

    Attributes:
        special: text -> id of the special tokens, which are no part of a decoded text.
        bytes: id -> value of the tokens that stand for one byte in a vocabulary of characters (<0x0A>); empty for other
            vocabularies.
        within: one of them, which is not the start of a text for what follows it; None if there are none.
        added: (token before them, or None at the start of a text; tokens) -> the text that they add.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token = getattr(tokenizer, "convert_ids_to_tokens", lambda _: "")
        candidates = special_tokens(tokenizer)
        self.special = {text: index for text, index in candidates.items() if not self._decode([index])}
        self._skipped = frozenset(self.special.values())
        self.bytes = self._byte_tokens()
        self.within = next((index for index, value in self.bytes.items() if value == ord("A")), None)
        self.added = lru_cache(_MAX_CACHED)(self._added)

    def skips(self, token_id: int) -> bool:
        """Return whether the token is no part of any text: a special token, or an id without a token."""
        return token_id in self._skipped or self._token(token_id) is None

    def _added(self, context: int | None, token_ids: tuple[int, ...]) -> str:
        if context is None:
            return self._decode(token_ids)
        return self._decode((context, *token_ids))[len(self.added(None, (context,))) :]

    def _decode(self, token_ids: Seq[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _byte_tokens(self) -> dict[int, int]:
        find = getattr(self._tokenizer, "convert_tokens_to_ids", None)
        ids = [] if find is None else find([f"<0x{value:02X}>" for value in range(256)])
        if len(set(ids) - {None}) < 256 or self._decode([ids[ord("A")]]) != "A":
            return {}
        return {index: value for value, index in enumerate(ids)}


class Detokenizer:
    """Decodes a growing list of tokens, never half a UTF-8 character, at constant cost per token.

    Bytes that are no UTF-8 become U+FFFD, one for each ill-formed sequence, as in Python's decoding with "replace"
    (tokenizers that replace every byte of such a run agree with it wherever the bytes are UTF-8). A character that the
    prompt begins and the answer completes is the answer's. If it is not completed, its U+FFFD is the prompt's.

    marks: id -> text of the special tokens whose text is shown, between that of the others, which stays as it is.
    """

    __slots__ = ("_begun", "_context", "_marks", "_pending", "_shown", "_texts", "_utf8")

    def __init__(self, texts: TokenTexts, prompt_ids: Seq[int], marks: Mapping[int, str] = NO_MARKS) -> None:
        self._texts = texts
        self._marks = marks
        self._context: int | None = None  # the last token that ended with a whole character
        self._pending: list[int] = []  # tokens after it
        self._shown = 0  # characters of their text that have been returned
        self._utf8 = getincrementaldecoder("utf-8")("replace")  # of tokens that stand for one byte
        self._begun = False  # the prompt ends inside a character of which nothing has been returned
        shown = (token_id for token_id in reversed(prompt_ids) if not texts.skips(token_id))
        self.push(list(islice(shown, _PROMPT_CONTEXT))[::-1])  # the tokens of the prompt that the output may depend on
        self._begun = bool(self._pending) or self._utf8.getstate()[0] != b""

    def push(self, ids: Seq[int]) -> str:
        """Append tokens, and return the text that they complete."""
        return self._after_prompt("".join(map(self._push, ids)))

    def flush(self) -> str:
        """Return the bytes at the end that never became a character, as replacement characters."""
        return self._after_prompt(self._left())

    def _left(self) -> str:
        left = self._texts.added(self._context, tuple(self._pending))[self._shown :] if self._pending else ""
        self._pending = []
        self._shown = 0
        return left + self._utf8.decode(b"", True)

    def _after_prompt(self, text: str) -> str:
        if self._begun and text:
            self._begun = False
            return text.removeprefix(_REPLACEMENT)
        return text

    def _push(self, token_id: int) -> str:
        texts = self._texts
        if texts.skips(token_id):
            return self._left() + self._marks[token_id] if token_id in self._marks else ""
        if token_id in texts.bytes:
            return self._push_byte(token_id)
        self._pending.append(token_id)
        text = texts.added(self._context, tuple(self._pending))
        if texts.bytes:  # the other tokens hold whole characters
            text = self._utf8.decode(b"", True) + text
        elif text.endswith(_REPLACEMENT):
            return self._hold(text)
        text = text[self._shown :]
        self._context = token_id
        self._pending = []
        self._shown = 0
        return text

    def _push_byte(self, token_id: int) -> str:
        value = self._texts.bytes[token_id]
        if self._context is None:
            self._context = self._texts.within
            if value < 0x80:
                return self._texts.added(None, (token_id,))
        return self._utf8.decode(bytes((value,)))

    def _hold(self, text: str) -> str:
        """Return the text of all pending tokens but its last U+FFFD, which further tokens may complete."""
        new = text[self._shown : -1]
        self._shown = len(text) - 1
        for size in range(1, min(4, len(self._pending))):
            head = tuple(self._pending[:-size])
            tail = tuple(self._pending[-size:])
            tail_text = self._texts.added(self._context, tail)
            if self._texts.added(self._context, head) + tail_text == text:  # no sequence of bytes goes over this border
                self._pending = list(tail)
                self._shown = len(tail_text) - 1
                break
        if len(self._pending) == _MAX_PENDING:
            self._pending = []
            self._shown = 0
            new += _REPLACEMENT
        return new


class _State:
    """A text that begins stop strings.

    Attributes:
        length: of the text.
        shorter: the state of its longest proper suffix that begins stop strings; None for the empty text, and until a
            text first enters the state.
        match: length of the longest stop string that the text ends with; 0 without one.
    """

    def __init__(self, stops: Seq[str], length: int = 0) -> None:
        self._stops = stops  # those that begin with the text
        self.length = length
        self.shorter: _State | None = None
        self.match = length if any(len(stop) == length for stop in stops) else 0

    @cached_property
    def following(self) -> dict[str, _State]:
        """Return the states of this text and one more character."""
        longer = defaultdict(list)
        for stop in self._stops:
            if len(stop) > self.length:
                longer[stop[self.length]].append(stop)
        return {character: _State(stops, self.length + 1) for character, stops in longer.items()}


class StopStrings:
    """A request's stop strings as one automaton (Aho and Corasick, 1975), which its choices share.

    Its states are made when a text first enters them, so that strings which no text begins cost nothing. After that, a
    character takes the same time however many strings there are, and however long.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.empty = _State(list(dict.fromkeys(stops)))

    def after(self, state: _State, character: str) -> _State:
        """Return the state of the longest suffix, of a text and one more character, that begins a stop string.

        state: the same of the text.
        """
        entered = []
        at: _State | None = state
        while at is not None:
            found = at.following.get(character)
            if found is not None:
                entered.append(found)
                if found.shorter is not None:
                    break
            at = at.shorter
        else:
            entered.append(self.empty)
        for shorter, longer in pairwise(reversed(entered)):
            longer.shorter = shorter
            longer.match = longer.match or shorter.match
        return entered[0]


NO_STOPS = StopStrings()


class TextStream:
    """Streams the text of one choice: cut before a stop string, or after it, holding back what may become one.

    Args:
        keeps_stop: the text holds the stop string that ends it.

    Attributes:
        stopped_by: the stop string that has ended it; empty if none has.
    """

    __slots__ = ("_detokenizer", "_held", "_keeps_stop", "_pieces", "_ready", "_state", "_stops", "stopped_by")

    def __init__(
        self,
        texts: TokenTexts,
        prompt_ids: Seq[int],
        stops: StopStrings = NO_STOPS,
        marks: Mapping[int, str] = NO_MARKS,
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(texts, prompt_ids, marks)
        self._keeps_stop = keeps_stop
        self.stopped_by = ""
        self._stops = stops
        self._state = stops.empty  # of the text so far
        self._held = ""  # decoded, not shown: the longest suffix that begins a stop string
        self._pieces: list[str] = []
        self._ready = 0  # pieces already taken

    @property
    def text(self) -> str:
        """Return all text that may be shown so far."""
        return "".join(self._pieces)

    def push(self, ids: Seq[int], num_exempt: int = 0) -> int | None:
        """Append tokens. Return how many of them complete the first stop string, or None if none does.

        num_exempt: stop strings completed by the first that many tokens are passed over (min_tokens).
        After a stop string the stream is closed: nothing more may be pushed.
        """
        if self._stops is NO_STOPS:
            self._show(self._detokenizer.push(ids))
            return None
        for i, token_id in enumerate(ids):
            new = self._detokenizer.push((token_id,))
            text = self._held + new
            found = self._find(new)
            if found is not None and i >= num_exempt:
                self.stopped_by = text[found]
                self._show(self._cut(text, found))
                self._held = ""
                return i + 1
            self._hold(new)
        return None

    def finish(self) -> None:
        """End the choice without a stop string: all held text becomes showable."""
        new = self._detokenizer.flush()
        found = self._find(new)
        self._show(self._cut(self._held + new, found))
        self._held = ""

    def _cut(self, text: str, stop: slice | None) -> str:
        if stop is None:
            return text
        return text[: stop.stop if self._keeps_stop else stop.start]

    def take(self) -> str:
        """Return the text that has become showable since the last call."""
        new = "".join(self._pieces[self._ready :])
        self._ready = len(self._pieces)
        return new

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _find(self, new: str) -> slice | None:
        """Return where in held + new the first stop string is that ends within new; None without one."""
        found: slice | None = None
        for end, character in enumerate(new, len(self._held) + 1):
            state = self._state = self._stops.after(self._state, character)
            if state.match and (found is None or end - state.match < found.start):
                found = slice(end - state.match, end)
        return found

    def _hold(self, new: str) -> None:
        """Show all but what may become a stop string."""
        while not self._state.following and self._state.shorter is not None:
            self._state = self._state.shorter  # a whole stop string, passed over, may only end in another's beginning
        text = self._held + new
        border = len(text) - self._state.length
        self._show(text[:border])
        self._held = text[border:]


def split_accepted(tokenizer: Any, chunk: Any) -> tuple[str, str]:
    """Split a chunk's text into the draft's part and the token that the target added.

    The first `num_accepted_draft` tokens of a chunk are the draft's. If the chunk's text does not begin with them as
    decoded alone (a character in several tokens, a stop string cut off), it counts as the draft's if most of it is.
    """
    count = chunk.num_accepted_draft
    if not count:
        return "", chunk.text
    drafted = tokenizer.decode(chunk.token_ids[:count])
    if chunk.text.startswith(drafted):
        return drafted, chunk.text[len(drafted) :]
    return (chunk.text, "") if 2 * count >= len(chunk.token_ids) else ("", chunk.text)
