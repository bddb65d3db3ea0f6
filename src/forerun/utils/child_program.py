"""The program of the child processes of `utils/children.py`. It imports nothing of forerun, so that it starts fast.

A frame is two lengths, a JSON object and bytes. A task is a function of a frame's bytes and arguments that returns an
object, and bytes. The kernel ends the process where a task takes more processor time than it may.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

MEMORY, MEMORY_PER_BYTE = 1 << 30, 96
"""Bytes of the process, and bytes more for each of a tokenizer.json; its vocabulary and llguidance's take about 60."""
MOST_BYTES = 1 << 26
"""Of an answer: more than any chat is long."""
_NICENESS = 5
"""The steps of the engine come first."""
RENDERS = "renders"
"""Argument of a process that gets ready to render."""
_LENGTHS = struct.Struct("<QQ")
_STATM = Path("/proc/self/statm")
Answer = tuple[dict[str, Any], bytes]


def write_frame(file: BinaryIO, fields: dict[str, Any], blob: bytes = b"") -> None:
    """Write a frame."""
    text = json.dumps(fields, default=_plain).encode()
    file.write(_LENGTHS.pack(len(text), len(blob)) + text)
    file.write(blob)
    file.flush()


def _plain(value: Any) -> Any:
    """Return what stands for a value that JSON cannot write: of messages and tools, the content of an object."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return dict(value) if hasattr(value, "keys") else f"<{type(value).__name__}>"


def read_frame(file: BinaryIO) -> Answer | None:
    """Read a frame; None at the end of the file, be it within a frame."""
    head = file.read(_LENGTHS.size)
    if len(head) < _LENGTHS.size:
        return None
    length, size = _LENGTHS.unpack(head)
    text = file.read(length)
    blob = file.read(size)
    return None if len(text) + len(blob) < length + size else (json.loads(text), blob)


# Chat templates


@cache
def _templates() -> Any:
    from transformers.utils import chat_template_utils

    return chat_template_utils


def render_template(blob: bytes, template: str, messages: list[Any], given: dict[str, Any]) -> Answer:
    """Return the text that a chat template makes of messages in Transformers' sandbox."""
    normalized = getattr(_templates(), "_normalize_chat_messages", list)(messages)  # as `apply_chat_template` does
    (text,), _ = _templates().render_jinja_template([normalized], chat_template=template, **given)
    return {}, text.encode("utf-8", "surrogatepass")


# Tokenizers, by the digest of their tokenizer.json

_contents: dict[str, bytes] = {}


def define(blob: bytes, key: str) -> Answer:
    """Keep the tokenizer.json of later tasks."""
    _limit_memory(MEMORY + MEMORY_PER_BYTE * len(blob))
    _contents[key] = blob
    return {}, b""


@cache
def _tokenizer(key: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_contents[key].decode())


def encode_blob(blob: bytes, key: str, special: bool) -> Answer:
    """Return the token ids of a text, as 32-bit integers."""
    return {}, array("I", _tokenizer(key).encode(blob.decode(), add_special_tokens=special).ids).tobytes()


# Grammars

_FIRST_STEPS = 64
"""First tokens that are tried."""
_EBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
_JSON: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as Python's json.dumps writes it: blanks that may be left out or doubled would have to be drawn."""


@cache
def _guidance(key: str, num_tokens: int, end_id: int) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(_contents[key].decode(), n_vocab=num_tokens, eos_token=end_id)


def _as_lark(text: str) -> str:
    """Return a grammar in Lark's notation; it may be EBNF as llama.cpp and vLLM read it. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not _EBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:
        raise ValueError(str(error)) from None


def compiled(tokenizer: Any, kind: str, text: str) -> Any:
    """Return llguidance's matcher of a `Grammar`. Raises ValueError if it cannot be followed.

    tokenizer: llguidance's.
    """
    from llguidance import LLMatcher, LLParserLimits

    if kind == "regex":
        source = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        source = LLMatcher.grammar_from_lark(_as_lark(text))
    else:
        source = LLMatcher.grammar_from_json_schema(text or '{"type": "object"}', defaults=_JSON)
    made = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
    _check(made)
    return made


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(matcher.get_error())


def _take_first_steps(matcher: Any, end_id: int) -> None:
    """Raise ValueError if the grammar allows nothing, or exceeds one of llguidance's limits soon."""
    start = matcher.deep_copy()
    mask = start.compute_bitmask()
    _check(start)
    allowed = (token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1 and token != end_id)
    first = [token for token, _ in zip(allowed, range(_FIRST_STEPS), strict=False)]
    if not first and not start.is_accepting():
        raise ValueError("it allows no text at all")
    for token in first:
        after = matcher.deep_copy()
        if after.try_consume_tokens([token]) != 1:
            raise ValueError(after.get_error() or "what it allows is refused")
    after = matcher.deep_copy()
    forced = after.compute_ff_tokens()
    if after.try_consume_tokens(forced) == len(forced):
        after.compute_bitmask()
        _check(after)


def try_grammar(blob: bytes, key: str, num_tokens: int, end_id: int, kind: str) -> Answer:
    """Compile a grammar, whose text are the bytes, and follow it a little. Return why it cannot be followed, or the
    bytes of memory that it takes."""
    tokenizer = _guidance(key, num_tokens, end_id)
    before = _resident()
    try:
        _take_first_steps(compiled(tokenizer, kind, blob.decode()), end_id)
    except ValueError as error:
        return {"refused": str(error)}, b""
    return {"nbytes": max(0, _resident() - before)}, b""


# The process

_TASKS: dict[str, tuple[Callable[..., Answer], Callable[..., Any], tuple[str, ...]]] = {
    "render": (render_template, _templates, ()),
    "define": (define, dict, ()),
    "encode": (encode_blob, _tokenizer, ("key",)),
    "try_grammar": (try_grammar, _guidance, ("key", "num_tokens", "end_id")),
}
"""By name a task, what makes it ready, whose time is not the task's, and the arguments of that."""


def _resident() -> int:
    """Return the bytes of memory that the process holds; 0 where the system does not tell."""
    with suppress(OSError):
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _limit_memory(nbytes: int) -> None:
    with suppress(ImportError, ValueError):  # there is no such bound on Windows, and a lower one may hold already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _answer(task: str, seconds: float, arguments: dict[str, Any], blob: bytes) -> Answer:
    perform, make_ready, names = _TASKS[task]
    try:
        make_ready(*(arguments[name] for name in names))
        _set_timer(seconds)
        fields, answer = perform(blob, **arguments)
        if len(answer) > MOST_BYTES:
            return {"exceeded": f"makes more than {MOST_BYTES >> 20} MiB"}, b""
        return fields, answer
    except MemoryError:
        return {"exceeded": ""}, b""
    except Exception as error:
        return {"failed": str(error)[:1000] or type(error).__name__}, b""
    finally:
        _set_timer(0.0)


def _set_timer(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # else the parent's limit is all there is
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Perform tasks until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with suppress(AttributeError, OSError):
        os.nice(_NICENESS)
    _limit_memory(MEMORY)
    if RENDERS in sys.argv:
        _templates()
    source = sys.stdin.buffer
    target = sys.stdout.buffer
    while (frame := read_frame(source)) is not None:
        fields, answer = _answer(**frame[0], blob=frame[1])
        write_frame(target, {**fields, "resident": _resident()}, answer)


if __name__ == "__main__":
    main()
