"""Parsing of the bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field as dataclass_field, replace
from typing import Any

from forerun.config import SamplingParams
from forerun.engine.chat_template import Prompt, encode
from forerun.engine.request_checks import naming_prompt
from forerun.errors import PromptError, RequestBodyError, SamplingError
from forerun.server.protocol import structured, tools
from forerun.server.protocol.fields import SPECULATIVE, checked_body, field, speculative_options
from forerun.utils.fields import described

_OTHERWISE_NAMED = (
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "prediction",
    "tenant",
    "drafter",
    "num_draft_tokens",
    "grammar",
)
"""Fields of SamplingParams that a body gives by another name, in another form, or not at all."""

SAME_NAMES = tuple(name for name in described(SamplingParams) if name not in _OTHERWISE_NAMED)
"""Fields that have the same name in a body: OpenAI's, and those that its client sends as `extra_body`."""

_ANY_LENGTH = 2**62
_MOST_STOPS = 256
"""Strings, and token ids, that end an answer."""


def sampling_params(body: Mapping[str, Any], others: Mapping[str, tuple[str, Any]]) -> SamplingParams:
    """Read the sampling options of a body; each is checked alone first, so that an error names its field.

    Args:
        others: field of SamplingParams -> (field of the body, value).

    Raises:
        RequestBodyError: an option is out of range or of a wrong type, or contradicts another.
    """
    given = {name: (name, body[name]) for name in SAME_NAMES if name in body} | dict(others)
    for name in ("stop", "stop_token_ids"):
        if isinstance(body.get(name), list) and len(body[name]) > _MOST_STOPS:
            raise RequestBodyError(f"{name} has {len(body[name])} entries, but may have {_MOST_STOPS}.", param=name)
    for name, (spelled, value) in given.items():
        try:
            SamplingParams(**{"max_tokens": _ANY_LENGTH, name: value})
        except SamplingError as error:
            renamed = str(error) if spelled == name else f"{spelled}: {error}"
            raise RequestBodyError(renamed, param=spelled) from None
    try:
        return SamplingParams(**{name: value for name, (_, value) in given.items()})
    except SamplingError as error:
        raise RequestBodyError(str(error)) from None


CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as OpenAI's. Of a chat it is what the context holds."""

_COMMON = (
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "logprobs",
    "prediction",
    SPECULATIVE,
    *structured.FIELDS,
    *SAME_NAMES,
)
_STREAM_OPTIONS = ("include_usage", "include_drafts")
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_CHAT = (*_COMMON, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", *_TOOLS)
_COMPLETION = (*_COMMON, "prompt", "echo", "best_of")


@dataclass(frozen=True, slots=True, repr=False)
class CompletionRequest:
    """A parsed body.

    Attributes:
        url: CHAT_URL or COMPLETIONS_URL: the form of prompts and answers.
        model: its name in the body; None without one.
        prompts: a chat has one, its messages; completions may have several, each with choices of its own.
        params: options of each prompt.
        echo: the answer begins with the prompt.
        stream: the answer is streamed.
        include_usage: the last chunk of a stream holds the usage.
        include_drafts: each chunk holds its tokens' texts and their drafters.
        template_options: variables of the chat template beside the messages.
        repeated: fields of the body that the answer repeats.
        tools: functions that the model may call.
        has_calls: the messages contain tool calls.
    """

    url: str
    model: str | None
    prompts: Seq[Prompt]
    params: SamplingParams
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    include_drafts: bool = False
    template_options: Mapping[str, Any] = dataclass_field(default_factory=dict)
    repeated: Mapping[str, Any] = dataclass_field(default_factory=dict)
    tools: Seq[dict[str, Any]] = ()
    has_calls: bool = False

    @property
    def prompt_field(self) -> str:
        """Return the name of the field that holds the prompts."""
        return {CHAT_URL: "messages", COMPLETIONS_URL: "prompt"}.get(self.url, "input")

    def encode(self, tokenizer: Any, name: str) -> list[list[int]]:
        """Tokenize each prompt.

        Args:
            tokenizer: of the target; None if it has none.
            name: of the target, for messages.

        Raises:
            RequestBodyError: the model cannot read a prompt.
        """
        options = self.template_options
        check_template_options(options, tokenizer)
        if self.tools or self.has_calls:
            tools.check_template_carries(tokenizer, "tools" if self.tools else self.prompt_field)
            options = {**options, "tools": list(self.tools) or None}
        made = []
        for index, prompt in enumerate(self.prompts):
            try:
                with naming_prompt(index, len(self.prompts)):
                    made.append(encode(prompt, tokenizer, name, options))
            except PromptError as error:
                raise RequestBodyError(str(error), param=self.prompt_field) from None
        return made


def parse_body(url: str, body: object, context_length: int) -> CompletionRequest:
    """Parse a body.

    Args:
        url: CHAT_URL or COMPLETIONS_URL.
        body: the JSON value.
        context_length: of the target.

    Raises:
        RequestBodyError: naming the field that is missing, malformed, or unsupported.
    """
    return _PARSERS[url](body, context_length)


def with_seed(request: CompletionRequest, seed: int) -> CompletionRequest:
    """Return the request with this seed if it has none."""
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=seed))


def _chat(value: object, context_length: int) -> CompletionRequest:
    body = checked_body(value, _CHAT)
    messages, has_calls = tools.read_messages(field(body, "messages").list_of("messages", dict))
    others = {**drafting_options(body), "max_tokens": _max_chat_tokens(body, context_length)}
    wanted = field(body, "logprobs").flag("logprobs", False)
    if "top_logprobs" in body and not wanted:
        raise RequestBodyError("top_logprobs needs logprobs to be true. Set it, or leave top_logprobs out.", "logprobs")
    if wanted:
        others["logprobs"] = ("top_logprobs", field(body, "top_logprobs").integer("top_logprobs", 0))
    others |= _grammar(body)
    options = template_options(body)
    streaming = _streaming(body)
    params = sampling_params(body, others)
    return CompletionRequest(
        CHAT_URL,
        model_of(body),
        [messages],
        params,
        **streaming,
        template_options=options,
        tools=tuple(tools.tools_of(body)),
        has_calls=has_calls,
    )


def _completion(value: object, context_length: int) -> CompletionRequest:
    body = checked_body(value, _COMPLETION)
    others = {**drafting_options(body), **_grammar(body)}
    others["max_tokens"] = ("max_tokens", body.get("max_tokens", DEFAULT_COMPLETION_TOKENS))
    echo = field(body, "echo").flag("echo", False)
    if "logprobs" in body:
        if isinstance(body["logprobs"], bool):
            raise field(body, "logprobs").wrong(
                "logprobs", "a whole number: how many of the most probable tokens to list"
            )
        others["logprobs"] = ("logprobs", body["logprobs"])
        if echo:
            others["prompt_logprobs"] = ("logprobs", body["logprobs"])
    streaming = _streaming(body)
    if streaming["stream"] and echo and "logprobs" in body:
        raise RequestBodyError(
            "logprobs of an echoed prompt are there when the answer is, so they are not streamed. Leave out stream, "
            "echo or logprobs.",
            param="echo",
        )
    params = sampling_params(body, others)
    if field(body, "best_of").integer("best_of", params.n) != params.n:
        raise RequestBodyError("best_of is not supported, other than equal to n. Leave it out.", param="best_of")
    return CompletionRequest(COMPLETIONS_URL, model_of(body), _prompts(body), params, echo, **streaming)


_PARSERS: Mapping[str, Callable[[object, int], CompletionRequest]] = {CHAT_URL: _chat, COMPLETIONS_URL: _completion}


def _prompts(body: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts: the body has a string, strings, token ids, or lists of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(entry, str) for entry in prompt):
            return list(prompt)
        if _are_token_ids(prompt):
            return [prompt]
        if all(isinstance(entry, list) and _are_token_ids(entry) for entry in prompt):
            return list(prompt)
    raise field(body, "prompt").wrong(
        "prompt", "a string, a list of strings, a list of token ids or a list of such lists, and not empty"
    )


def _are_token_ids(entries: list[Any]) -> bool:
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries)


def _max_chat_tokens(body: Mapping[str, Any], context_length: int) -> tuple[str, Any]:
    """Return (field, number) of max_completion_tokens, or of its older name max_tokens."""
    new, old = body.get("max_completion_tokens"), body.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise RequestBodyError(
            "max_completion_tokens and max_tokens differ. Give one of them.", param="max_completion_tokens"
        )
    if new is not None:
        return "max_completion_tokens", new
    return "max_tokens", context_length if old is None else old


def drafting_options(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the options of drafting: field of SamplingParams -> (field of the body, value)."""
    found = speculative_options(body)
    if "prediction" in body:
        found["prediction"] = ("prediction", _prediction(body))
    return found


def _grammar(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the grammar as an option, if there is one."""
    found = structured.grammar_of(body)
    return {} if found is None else {"grammar": found}


def _prediction(body: Mapping[str, Any]) -> str:
    """Return the text of {"type": "content", "content": TEXT or parts of text}."""
    wrong = field(body, "prediction").wrong(
        "prediction", '{"type": "content", "content": ...} with a text, or a list of {"type": "text", "text": ...}'
    )
    given = body["prediction"]
    if not isinstance(given, dict) or given.get("type") != "content":
        raise wrong
    content = given.get("content")
    parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise wrong
    return "".join(part["text"] for part in parts)


def _streaming(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether to stream, and what the stream holds beside the text."""
    stream = field(body, "stream").flag("stream", False)
    options = field(body, "stream_options").fields("stream_options", None)
    if options is None:
        return {"stream": stream}
    if not stream:
        raise RequestBodyError("stream_options needs stream to be true. Leave it out.", param="stream_options")
    if set(options.values) - {*_STREAM_OPTIONS}:
        known = " and ".join(_STREAM_OPTIONS)
        raise RequestBodyError(f"stream_options may hold {known} alone. Leave the rest out.", "stream_options")
    return {"stream": True, **{name: options.flag(name, False) for name in _STREAM_OPTIONS}}


def template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the variables of the chat template. Raises RequestBodyError if the field is not an object."""
    options = field(body, "chat_template_kwargs").fields("chat_template_kwargs", None)
    return {} if options is None else options.values


def check_template_options(options: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise RequestBodyError if an option is a parameter of `apply_chat_template` itself."""
    taken = inspect.signature(tokenizer.apply_chat_template).parameters if options and tokenizer is not None else ()
    for option in options:
        if option in taken:
            raise RequestBodyError(
                f"chat_template_kwargs sets {option!r}, which is no option of a template. Leave it out.",
                param="chat_template_kwargs",
            )


def model_of(body: Mapping[str, Any]) -> str | None:
    """Return the model that the body names."""
    return field(body, "model").string("model", None)
