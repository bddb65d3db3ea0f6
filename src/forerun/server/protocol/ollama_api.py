"""Requests and answers of Ollama's /api/generate and /api/chat."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from forerun.chat.infill import Infill
from forerun.chat.response_format import CONTENT, REASONING
from forerun.config import SamplingParams
from forerun.engine.results import Generation, StepOutput
from forerun.errors import RequestBodyError
from forerun.sampling import TokenLogprob
from forerun.server.protocol.answers import Asked, chat_logprobs, metrics
from forerun.server.protocol.bodies import (
    SAME_NAMES,
    Body,
    Count,
    GenerationBody,
    TopLogprobs,
    check_window,
    grammar_of,
    in_clients_words,
    validated,
)
from forerun.server.protocol.requests import (
    OLLAMA_CHAT_URL,
    OLLAMA_GENERATE_URL,
    CallOptions,
    CompletionRequest,
    with_effort,
    with_read_calls,
)
from forerun.server.protocol.without_effect import ignored_tools
from forerun.utils.habits import hint, option_for
from forerun.utils.json_file import described_value

OF_LOADING = frozenset(
    {
        *("num_gpu", "main_gpu", "num_thread", "num_batch", "use_mmap", "use_mlock", "numa", "low_vram", "f16_kv"),
        *("num_gqa", "logits_all", "embedding_only", "num_keep", "use_imagegen_runner"),
    }
)
"""Options of how Ollama loads a model, and what it keeps of a context that it shifts: taken without effect, since this
server's model is loaded, and its context is never shifted."""
SWITCHED_OFF: Mapping[str, Any] = {
    "mirostat": 0,
    "tfs_z": 1,
    "typical_p": 1,
    "vocab_only": False,
    "penalize_newline": True,
}
"""Options that forerun does not have, and the value that changes nothing."""
_OF_MIROSTAT = ("mirostat_tau", "mirostat_eta")
_KNOWN = frozenset({*SAME_NAMES, "max_tokens", "speculative", "prediction", "cache_salt"} - {"n"})
"""Options that are taken by these names, or by others of `HABITS`."""
_WITHOUT_LIMIT = (-1, -2)
"""Values of num_predict: up to a limit of the context."""


class _Options(GenerationBody):
    """Options by forerun's names."""

    max_tokens: Count | None = None


def sampling_params(
    options: Mapping[str, Any], context_length: int, own: Mapping[str, Any], **others: Any
) -> SamplingParams:
    """Return the options of sampling that a body's `options` are.

    Args:
        options: by Ollama's names, or by forerun's.
        context_length: of the target.
        own: those that the model recommends, for what is left out.
        others: fields of SamplingParams that are given elsewhere.

    Raises:
        RequestBodyError: an option would change the text and is not supported, or is out of range.
    """
    given: dict[str, Any] = {}
    names: dict[str, str] = {}  # ours -> the client's
    for name, value in options.items():
        option = _option_of(name, value, context_length)
        if option is None:
            continue
        if option in given:
            raise RequestBodyError(f"options.{name} and options.{names[option]} are the same. Give one.", "options")
        given[option] = value
        names[option] = name
    if given.get("max_tokens") in _WITHOUT_LIMIT:
        del given["max_tokens"]
    try:
        body = validated(_Options, given)
        params = body.params(own, **{"max_tokens": body.max_tokens or context_length, **others})
    except RequestBodyError as error:
        raise in_clients_words(error, {ours: f"options.{theirs}" for ours, theirs in names.items()}) from None
    check_window(options.get("repeat_last_n"), params, "options.repeat_last_n")
    return params


def _option_of(name: str, value: Any, context_length: int) -> str | None:
    """Return forerun's name of an option; None if it is taken without effect. Raises RequestBodyError.

    The context of the server serves for every smaller one that a client names.
    """
    shown = f"options.{ascii(name[:60])[1:-1]}"
    if value is None or name in OF_LOADING or name in (*_OF_MIROSTAT, "repeat_last_n"):
        return None
    if name == "num_ctx":
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= context_length:
            raise RequestBodyError(
                f"{shown} is {described_value(value)}, but must be a whole number in 1..{context_length}, the context "
                "of this server. Lower it, or start the server with a larger --max-model-len, as far as the model and "
                "memory go.",
                shown,
            )
        return None
    if name in SWITCHED_OFF:
        allowed = SWITCHED_OFF[name]
        if value == allowed:
            return None
        raise RequestBodyError(
            f"{shown} is {described_value(value)}, which forerun does not do, and it would change the text. Give "
            f"{json.dumps(allowed)}, or leave it out.",
            shown,
        )
    option = name if name in _KNOWN else option_for(name, _KNOWN)
    if option in _KNOWN:
        return option
    remedy = hint(name, sorted(_KNOWN), repr, sentences=False) or "Leave it out."
    raise RequestBodyError(f"{shown} is {described_value(value)}, and no option of forerun's. {remedy}", shown)


_ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_TRIMS = ((re.compile(r"\s*\{\{-(?=\s)"), "{{"), (re.compile(r"(?<=\s)-\}\}\s*"), "}}"))
_NAMED = re.compile(r"(?:(if)\s+)?\.(System|Prompt|Suffix)")


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return a template of Ollama's with its values, up to the place of the answer.

    Of Go's templates there are {{ .System }}, {{ .Prompt }}, {{ .Suffix }}, {{ .Response }}, {{ if }} of one of these,
    {{ else }} and {{ end }}.

    Raises:
        RequestBodyError: it has anything else, or its blocks do not end.
    """
    for pattern, mark in _TRIMS:
        template = pattern.sub(mark, template)
    written: list[str] = []
    shown = [True]  # of each open block whether its text counts
    for number, part in enumerate(_ACTION.split(template)):
        action = part.strip()
        named = _NAMED.fullmatch(action)
        if number % 2 == 0:
            written += [part] if all(shown) else []
        elif named and named[1]:
            shown.append(bool(values[named[2]]))
        elif named:
            written += [values[named[2]]] if all(shown) else []
        elif action == ".Response":
            if all(shown):
                return "".join(written)
        elif action == "else" and len(shown) > 1:
            shown[-1] = not shown[-1]
        elif action == "end" and len(shown) > 1:
            shown.pop()
        else:
            raise RequestBodyError(
                f"template holds {ascii(action[:40])[1:-1]} in braces, which is not read. Give .System, .Prompt, "
                ".Suffix and .Response, `if` of one of them, `else` and `end`, or send the whole prompt with raw.",
                "template",
            )
    if len(shown) > 1:
        raise RequestBodyError("template has an `if` without its `end`. Close it.", "template")
    return "".join(written)


class _FunctionCalled(TypedDict):
    """A function that was called."""

    name: str
    arguments: NotRequired[dict[str, Any] | None]


class _EarlierCall(TypedDict):
    """A call of an earlier answer."""

    id: NotRequired[str | None]
    function: _FunctionCalled


class OllamaMessage(TypedDict):
    """A message of a chat."""

    role: str
    content: NotRequired[str | None]
    thinking: NotRequired[str | None]
    images: NotRequired[list[Any] | None]
    tool_calls: NotRequired[list[_EarlierCall] | None]
    tool_name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]


def chat_of(messages: Seq[Any]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Calls without ids get them, and their results follow in the calls' order.

    Raises:
        RequestBodyError: a message has images.
    """
    chat: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # id and name of calls without a result
    count = 0
    for given in messages:
        if given.get("images"):
            raise RequestBodyError("messages have images, but forerun reads text alone. Leave them out.", "messages")
        message = {"role": given["role"], "content": given.get("content") or ""}
        if given.get("thinking"):
            message["reasoning_content"] = given["thinking"]
        calls = []
        for call in given.get("tool_calls") or ():
            function = {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}
            name = call.get("id") or f"call{count:05d}"  # nine letters and digits, as Mistral's templates demand
            calls.append({"id": name, "type": "function", "function": function})
            pending.append((name, function["name"]))
            count += 1
        if calls:
            message["tool_calls"] = calls
        if given["role"] == "tool":
            tool = given.get("tool_name")
            answered = [call for call in pending if tool in (None, call[1])] or pending or [("", "")]
            name = given.get("tool_call_id") or answered[0][0]
            pending = [call for call in pending if call[0] != name]
            message |= ({"tool_call_id": name} if name else {}) | ({"name": tool} if tool else {})
        chat.append(with_read_calls(message))
    return chat


class _OllamaBody(Body):
    """What both bodies have. Whatever it is, `keep_alive` unloads nothing: the server has one model, and keeps it."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description='"json", or a JSON schema')
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = Field(None, description="a number of seconds, or a duration such as '5m'")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="true, false, 'low', 'medium' or 'high'"
    )
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def _params(self, context_length: int, own: Mapping[str, Any]) -> SamplingParams:
        """Return the options of sampling. Raises RequestBodyError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestBodyError("top_logprobs needs logprobs to be true. Set it, or leave it out.", "logprobs")
        form = ("json_object", True) if self.format == "json" else ("json", self.format)
        return sampling_params(
            self.options or {},
            context_length,
            own,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=grammar_of({"format": form if self.format else None}),
        )

    def _template_options(self) -> dict[str, Any]:
        thinks = {} if self.think is None else {"enable_thinking": bool(self.think)}
        return with_effort(thinks, self.think if isinstance(self.think, str) else None)


class GenerateBody(_OllamaBody):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    context: list[Any] | None = None

    def request(self, context_length: int, own: Mapping[str, Any], kept: object = None) -> CompletionRequest:
        """Return the request, without prompts if it only asks for the model to be loaded; arguments as of `ChatBody`.

        Raises:
            RequestBodyError: a field is not supported, or contradicts another.
        """
        self._check()
        is_chat = not (self.raw or self.template or self.suffix)
        prompt: Any = self._chat() if is_chat else self._text()
        return CompletionRequest(
            OLLAMA_GENERATE_URL,
            self.model,
            [prompt] if self.prompt or self.suffix else [],
            self._params(context_length, own),
            "prompt",
            stream=self.stream is not False,
            template_options=self._template_options() if is_chat else {},
            ignored=[*self.ignored, *(["think"] if self.think is not None and not is_chat else [])],
        )

    def _check(self) -> None:
        """Raise RequestBodyError for fields that would be ignored."""
        if self.images:
            raise RequestBodyError("images are not read: forerun reads text alone. Leave them out.", "images")
        if self.context:
            raise RequestBodyError(
                "context is not read: Ollama no longer recommends it. Send the conversation to /api/chat.", "context"
            )
        for name in ("system", "template", "suffix"):
            if self.raw and getattr(self, name):
                raise RequestBodyError(f"raw is for a whole prompt, and {name} changes it. Leave one out.", name)
        if self.suffix and self.system and not self.template:
            raise RequestBodyError("suffix fills in a text, which has no system message. Leave one out.", "system")

    def _chat(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def _text(self) -> str | Infill:
        """Return the prompt as text, or texts before and behind it. Raises RequestBodyError."""
        if self.template:
            values = {"System": self.system, "Prompt": self.prompt, "Suffix": self.suffix}
            return fill_template(self.template, {name: value or "" for name, value in values.items()})
        return Infill(self.prompt or "", self.suffix) if self.suffix else self.prompt or ""


class OllamaChatBody(CallOptions, _OllamaBody):
    """The body of /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = Field(
        None,
        description="a list of messages, each with role and content, or with thinking, tool_calls and tool_name: only "
        "text is read, no images",
    )

    def request(self, context_length: int, own: Mapping[str, Any], kept: object = None) -> CompletionRequest:
        """Return the request, without prompts if it only asks for the model to be loaded; arguments as of `ChatBody`.

        A last message of the assistant is continued, as Ollama does. Raises RequestBodyError.
        """
        chat = chat_of(self.messages or ())
        goes_on = bool(chat) and chat[-1]["role"] == "assistant"
        params = self._params(context_length, own)
        return CompletionRequest(
            OLLAMA_CHAT_URL,
            self.model,
            [chat] if chat else [],
            params,
            **self.calls(params.grammar),
            stream=self.stream is not False,
            template_options=self._template_options(),
            ending={"continue_final_message": True} if goes_on else {},
            ignored=[*self.ignored, *ignored_tools(self.tools)],
        )


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it. seconds: Unix time; None: now."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


def _line(request: CompletionRequest, model: str, said: str, thought: str = "", calls: Seq[Any] = ()) -> dict[str, Any]:
    """Return an object of an answer. model: its name where the request has none."""
    thinking = {"thinking": thought} if thought else {}
    content: dict[str, Any] = {"response": said, **thinking}
    if request.url == OLLAMA_CHAT_URL:
        made = [
            {
                "id": call["id"],
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
        called = {"tool_calls": made} if made else {}
        content = {"message": {"role": "assistant", "content": said, **thinking, **called}}
    return {"model": request.model or model, "created_at": timestamp(), **content, "done": False}


def load_answer(request: CompletionRequest, model: str) -> dict[str, Any]:
    """Return the answer to a request without a prompt."""
    return _line(request, model, "") | {"done": True, "done_reason": "load"}


class OllamaLines:
    """Makes the body or the lines of one answer.

    Attributes:
        num_events: 0, since lines have no numbers.
    """

    num_events = 0

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._message = asked.message()
        self._num_calls = 0  # that have been sent
        self._started = time.monotonic_ns()

    def whole(self, generations: Seq[Generation]) -> dict[str, Any]:
        """Return the body of the answer."""
        (choice,) = generations[0].choices
        self._message.push(choice.text, last=True)
        message = self._message
        made = self._made(message.content or "", message.reasoning, message.calls, choice.logprobs)
        return made | self._end(generations[0])

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that come before any output: none."""
        yield from ()

    def keep_alive(self, progress: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """Yield a line that adds nothing, while the prompt is computed (`Chunks.keep_alive`)."""
        yield self.idle() | {"progress": progress}

    def of(self, prompt: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the line of one output; none if there is nothing to show yet. A call comes when it is whole."""
        chunk = output.chunk
        deltas = self._message.push(chunk.text, last=chunk.finish_reason is not None)
        said, thought = ("".join(each.text for each in deltas if each.kind == kind) for kind in (CONTENT, REASONING))
        calls = self._message.calls[self._num_calls :]
        self._num_calls += len(calls)
        if said or thought or calls or chunk.logprobs:
            yield self._made(said, thought, calls, chunk.logprobs)

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield the line that ends the stream."""
        yield self.idle() | self._end(generations[0])

    def idle(self) -> dict[str, Any]:
        """Return a line that adds nothing."""
        return self._made("", "", (), None)

    def _made(self, said: str, thought: str, calls: Seq[Any], logprobs: Seq[TokenLogprob] | None) -> dict[str, Any]:
        made = _line(self._asked.request, self._asked.model, said, thought, calls)
        return made | ({"logprobs": chat_logprobs(logprobs, self._asked.texts.names)["content"]} if logprobs else {})

    def _end(self, generation: Generation) -> dict[str, Any]:
        """Return why an answer has ended, and its figures: durations in nanoseconds."""
        (choice,) = generation.choices
        first = choice.stats.time_first_token
        total = choice.stats.time_total
        return {
            "done": True,
            "done_reason": choice.finish_reason,
            "total_duration": time.monotonic_ns() - self._started,
            "load_duration": 0,
            "prompt_eval_count": len(generation.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": len(choice.token_ids),
            "eval_duration": _nanoseconds(total - first),
            **metrics([choice.stats]),
        }


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 1)  # clients divide by it
