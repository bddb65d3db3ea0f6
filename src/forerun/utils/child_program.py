"""The program of the child processes of `utils/children.py`. It imports nothing of forerun, so that it starts fast.

A frame is two lengths, a JSON object and bytes. A task is a function of a frame's bytes and arguments that returns an
object, and bytes. The kernel ends the process where a task takes more processor time than it may.
"""

from __future__ import annotations

import json
import mmap
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
from time import process_time
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


_END = "7041720071"
"""Marks where a text ends: digits, which no template changes."""
_TRACE = "704170{}{:06}071407"
"""Marks a message, by its index."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages that hold thinking."""


def render_template(
    blob: bytes,
    template: str,
    messages: list[Any],
    given: dict[str, Any],
    open_key: str | None = None,
    is_traced: bool = False,
) -> Answer:
    """Return the text that a chat template makes of messages in Transformers' sandbox.

    Args:
        open_key: of the last message, at the end of whose text the whole text ends; None if the template ends it.
        is_traced: return the indices of the messages that leave no trace in the text, too.
    """
    from jinja2 import TemplateSyntaxError

    def rendered(chat: list[Any]) -> str:
        (text,), _ = _templates().render_jinja_template([chat], chat_template=template, **given)
        return str(text)

    *before, last = messages
    try:
        text = rendered([*before, _marked(last, open_key, _END)] if open_key else messages)
    except TemplateSyntaxError as error:
        raise ValueError(f"it is no Jinja template, by its line {error.lineno}: {error.message}") from None
    if open_key:
        text, mark, _ = text.rpartition(_END)
        if not mark:
            raise ValueError(f"it does not write the {open_key} of the last message, to go on from there")
    lost: list[int] = []
    if is_traced:
        with suppress(Exception):  # a template that reads texts may refuse those with marks
            traced = [
                _traced(message, index, is_open=bool(open_key) and message is last)
                for index, message in enumerate(messages)
            ]
            traces = rendered([message for message, _ in traced])
            lost = [
                index
                for index, (_, marks) in enumerate(traced)
                if not all(mark in traces or (instead and instead in text) for mark, instead in marks.items())
            ]
    return {"lost": lost}, text.encode("utf-8", "surrogatepass")


def _traced(message: dict[str, Any], index: int, *, is_open: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a message with a mark in each text that must be in the prompt, and the marks, each with what may be there
    in its place: of a call its id. Text beside calls may be left out, and thinking unless the message goes on."""
    calls = message.get("tool_calls") or []
    content = message.get("content")
    keys = [] if content is None or calls else ["content"]
    keys += [key for key in THOUGHTS if is_open and message.get(key)][:1]
    marks = {}
    for key in keys:
        marks[mark := _TRACE.format(int(key == "content"), index)] = ""
        message = _marked(message, key, mark)
    named = []
    for place, call in enumerate(calls):
        function = call.get("function", call)
        marks[mark := _TRACE.format(place + 2, index)] = str(call.get("id") or "")
        named.append({**call, "function": _marked(function, "name", mark)})
    return ({**message, "tool_calls": named} if named else message), marks


def _marked(message: dict[str, Any], key: str, mark: str) -> dict[str, Any]:
    """Return a message with a mark at the end of a text, or of its last part."""
    value = message[key]
    if not isinstance(value, str):
        return {**message, key: [*value[:-1], _marked(value[-1], "text", mark)]}
    return {**message, key: value + mark}


# Tokenizers, by the digest of their tokenizer.json

_contents: dict[str, bytes] = {}


def memory_beside(content: bytes) -> int:
    """Return the bytes of memory that a process may have with a tokenizer.json."""
    return MEMORY + MEMORY_PER_BYTE * len(content)


def define(blob: bytes, key: str) -> Answer:
    """Keep the tokenizer.json of later tasks."""
    _limit_memory(memory_beside(blob))
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
    bytes of memory that it takes and the processor time of this and of compiling it again."""
    tokenizer = _guidance(key, num_tokens, end_id)
    before = _resident()
    started = process_time()
    try:
        made = compiled(tokenizer, kind, blob.decode())
        again = process_time() - started
        _take_first_steps(made, end_id)
    except ValueError as error:
        return {"refused": str(error)}, b""
    seconds = process_time() - started + again
    return {"nbytes": max(0, _resident() - before) + len(blob), "seconds": seconds}, b""


@cache
def _jsonschema() -> Any:
    import jsonschema

    return jsonschema


def check_answer(blob: bytes, schema: str) -> Answer:
    """Return where an answer, which the bytes are, breaks a JSON schema, and how; nothing if it does not."""
    package = _jsonschema()
    given = json.loads(schema)
    kind = package.validators.validator_for(given, default=package.Draft202012Validator)
    # where a registry is given, no reference is looked up elsewhere
    checked = kind(given, registry=package.validators.SPECIFICATIONS)
    error = package.exceptions.best_match(checked.iter_errors(json.loads(blob)))
    return {"broken": "" if error is None else f"{error.json_path}: {error.validator}"}, b""


# The process

_TASKS: dict[str, tuple[Callable[..., Answer], Callable[..., Any], tuple[str, ...]]] = {
    "render": (render_template, _templates, ()),
    "define": (define, dict, ()),
    "encode": (encode_blob, _tokenizer, ("key",)),
    "try_grammar": (try_grammar, _guidance, ("key", "num_tokens", "end_id")),
    "check_answer": (check_answer, _jsonschema, ()),
}
"""By name a task, what makes it ready, whose time is not the task's, and the arguments of that."""


def _resident() -> int:
    """Return the bytes of memory that the process holds."""
    with suppress(OSError):  # macOS and Windows have no such file
        return int(_STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    return int(_psutil().Process().memory_info().rss)


def _psutil() -> Any:
    import psutil  # Linux tells without it, which takes as long to import as all that is imported here

    return psutil


def _limit_memory(nbytes: int) -> None:
    """Have the kernel refuse more memory. On macOS and Windows it does not, and the parent watches instead."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):  # a lower bound may hold already
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _give_way() -> None:
    with suppress(OSError):
        if sys.platform == "win32":
            psutil = _psutil()
            psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        else:
            os.nice(_NICENESS)


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
    if sys.platform != "win32":  # else the parent's limit is all there is
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Perform tasks until the parent closes its end."""
    for name in ("SIGINT", "SIGBREAK"):  # the parent decides
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _give_way()
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
