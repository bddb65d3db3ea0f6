"""Requests for answers, as the bodies of /v1/chat/completions and /v1/completions make them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence as Seq
from dataclasses import dataclass, field as dataclass_field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WrapValidator
from typing_extensions import TypedDict

from forerun.chat.forced_calls import Forced
from forerun.chat.infill import Infill
from forerun.chat.messages import read_calls
from forerun.chat.response_format import CALL, REASONING, ResponseFormat
from forerun.chat.response_parser import ResponseParser
from forerun.config import MAX_TOP_LOGPROBS, SamplingParams
from forerun.engine import LLM
from forerun.engine.chat_template import Prompt, encode
from forerun.engine.request_checks import naming_prompt
from forerun.engine.sequence import Request
from forerun.errors import ContextLengthError, GrammarError, PromptError, RequestBodyError
from forerun.server.protocol.bodies import (
    BodyPart,
    Count,
    Format,
    Function,
    GenerationBody,
    Messages,
    Strings,
    StructuredOutputs,
    TokenIds,
    TopLogprobs,
    grammar_of,
    validated,
)
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.without_effect import check_choice, ignored_tools, offered_tools, take_tool

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MESSAGES_URL = "/v1/messages"
OLLAMA_GENERATE_URL = "/api/generate"
OLLAMA_CHAT_URL = "/api/chat"
INFILL_URL = "/infill"
_EFFORTS = {
    CHAT_URL: "reasoning_effort",
    MESSAGES_URL: "output_config.effort",
    OLLAMA_GENERATE_URL: "think",
    OLLAMA_CHAT_URL: "think",
}
"""The field of bodies that says how much the model thinks."""
DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as OpenAI's. Of a chat it is what the context holds."""
_OF_RENDERING = frozenset(
    {
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
    }
)
"""Parameters of Transformers' `apply_chat_template`, whose import takes seconds."""


class StreamOptions(BodyPart):
    """What a stream holds beside the text.

    Attributes:
        include_usage: in its last chunk the usage.
        continuous_usage_stats: with that, in each chunk the usage of its choice so far.
        include_drafts: in each chunk its tokens' texts and their drafters.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_drafts: bool = False
    include_obfuscation: Literal[False] | None = False


@dataclass(frozen=True, slots=True)
class Returned:
    """What an answer has beside its texts.

    Attributes:
        prompt_logprobs: as of SamplingParams; None: none are returned.
        token_ids: those of prompt and answer.
        names_by_id: tokens of log-probabilities are named `token_id:5`.
    """

    prompt_logprobs: int | None = None
    token_ids: bool = False
    names_by_id: bool = False


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Where an answer ends by its text.

    Attributes:
        indent: before a line with fewer blanks before its text; 0: at none.
        seconds: at the first end of a line after so much time since its first token; 0: at none.
    """

    indent: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.indent or self.seconds)


@dataclass(frozen=True, slots=True, repr=False)
class CompletionRequest:
    """A request for answers.

    Attributes:
        url: of the endpoint: the form of prompts and answers.
        model: its name in the body; None without one.
        prompts: a chat has one, its messages; completions may have several, each with choices of its own. Without any,
            nothing is computed.
        params: options of each prompt.
        prompt_field: the field of the body that holds the prompts.
        echo: the answer begins with the prompt; that of a chat with its last message, if it is the assistant's.
        only_prompt: the answer is no more than the echo.
        special: prompts have the tokens that the tokenizer puts around a text; None: texts do.
        truncate: tokens that a prompt keeps, its last ones; -1: as many as leave room for the answer.
        returned: what the answer has beside its texts.
        request_id: of the client's, in the answer's id.
        stream: the answer is streamed.
        stream_options: what a stream holds beside the text.
        template_options: variables of the chat template beside the messages.
        ending: whether the last message is continued, or an answer opened behind it; empty: an answer is opened.
        repeated: fields of the body that the answer repeats.
        keep: takes the body of the answer, for later requests; None if none is kept.
        tools: functions that the model may call.
        one_call: an answer has one call at most.
        forced: calls that must be made, or must follow their schemas.
        limits: where the answer ends by its text.
        ignored: fields of the body, and kinds of tools, that have no effect.
    """

    url: str
    model: str | None
    prompts: Seq[Prompt]
    params: SamplingParams
    prompt_field: str = "messages"
    echo: bool = False
    only_prompt: bool = False
    special: bool | None = None
    truncate: int | None = None
    returned: Returned = dataclass_field(default_factory=Returned)
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions = dataclass_field(default_factory=StreamOptions)
    template_options: Mapping[str, Any] = dataclass_field(default_factory=dict)
    ending: Mapping[str, bool] = dataclass_field(default_factory=dict)
    repeated: Mapping[str, Any] = dataclass_field(default_factory=dict)
    keep: Callable[[dict[str, Any]], None] | None = None
    tools: Seq[Any] = ()
    one_call: bool = False
    forced: Forced | None = None
    limits: TextLimits = TextLimits()
    ignored: Seq[str] = ()

    @property
    def is_chat(self) -> bool:
        """Return whether the prompt is messages, whose answer may hold thinking and calls."""
        first: Any = self.prompts[0]
        return isinstance(first, list) and bool(first) and isinstance(first[0], Mapping)

    def unread_by(self, tokenizer: Any) -> list[str]:
        """Return what was ignored, with an effort that the model's chat template does not read."""
        is_read = "reasoning_effort" in str(getattr(tokenizer, "chat_template", ""))
        is_given = "reasoning_effort" in self.template_options
        return [*self.ignored, *([_EFFORTS.get(self.url, "reasoning.effort")] if is_given and not is_read else [])]

    def requests(self, llm: LLM, texts: ModelTexts, flow: Hashable = None) -> list[Request]:
        """Return the engine's request of each prompt, which is tokenized and checked.

        Args:
            texts: of the target.
            flow: as of `Engine.requests`.

        Raises:
            RequestBodyError: the model cannot read a prompt, has no chat template that reads the options, or no grammar
                forces its calls.
            SamplingError, DeviceError: as `LLM.requests`.
        """
        check_template_options(self.template_options)
        options = {**self.template_options, **self.ending, **({"tools": [*self.tools]} if self.tools else {})}
        form = self.response_format(texts)
        chat: Any = self.prompts[0] if self.is_chat else ()
        has_calls = self.tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in chat)
        if has_calls and not texts.carry_calls:
            param = "tools" if self.tools else self.prompt_field
            raise RequestBodyError(
                f"{param} cannot be used with this model: its chat template does not carry tools, or calls in a format "
                "that is not known. Leave it out, take a model that was made for tools, or give its response template.",
                param,
            )
        params = self.params
        try:
            encoded = self._encoded(llm, options)
            prompts = [each if isinstance(each, Infill) else each[-self._most_kept(llm) :] for each in encoded]
            if self.forced is not None:
                assert form is not None
                assert not isinstance(prompts[0], Infill)
                kind = self.parser(form, texts, prompts[0], "").kind
                if kind == CALL:
                    raise PromptError("The last message begins a call, which tool_choice cannot force. Leave it out.")
                thinks = kind == REASONING
                grammars = llm.engine.grammars
                most = params.max_tokens
                grammar = self.forced.grammar(form, self.tools, grammars, thinks, self.one_call, most)
                params = replace(params, grammar=grammar)
            made = llm.requests(prompts, params, stream=self.stream or bool(self.limits), flow=flow)
        except PromptError as error:
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            raise RequestBodyError(str(error), self.prompt_field, code) from None
        except GrammarError as error:
            raise RequestBodyError(str(error), params.grammar.field if params.grammar else None) from None
        marks = texts.marks(form)
        cut = [
            0 if isinstance(given, Infill) else len(given) - len(each.prompt_token_ids)
            for given, each in zip(encoded, made, strict=True)
        ]
        return [
            replace(each, marks={**each.marks, **marks}, num_cut=num_cut)
            for each, num_cut in zip(made, cut, strict=True)
        ]

    def _encoded(self, llm: LLM, options: Mapping[str, Any]) -> list[list[int] | Infill]:
        """Return the token ids of each prompt; those of `Infill` as they are. Raises PromptError."""
        model = llm.target if self.truncate is None else None  # what is cut may be too long
        found: list[list[int] | Infill] = []
        for index, prompt in enumerate(self.prompts):
            if isinstance(prompt, Infill):
                _check_infill(llm, "suffix" if self.url == COMPLETIONS_URL else self.prompt_field)
                found.append(prompt)
                continue
            with naming_prompt(index, len(self.prompts)):
                found.append(encode(prompt, llm.tokenizer, llm.target.name, options, special=self.special, model=model))
        return found

    def _most_kept(self, llm: LLM) -> int:
        """Return how many tokens of a prompt are kept at most; 0 for all. Raises RequestBodyError if none could be."""
        if self.truncate != -1:
            return self.truncate or 0
        most = llm.target.context_length
        room = most - (self.params.max_tokens if self.params.max_tokens < most else 1)  # a chat may fill the context
        if room < 1:
            raise RequestBodyError("max_tokens leaves no room for a prompt in the context. Lower it.", "max_tokens")
        return room

    def parser(self, form: ResponseFormat, texts: ModelTexts, token_ids: Seq[int], name: str) -> ResponseParser:
        """Return the parser of an answer, or of what goes on in the last message.

        Args:
            form: of the answer.
            token_ids: of the prompt.
            name: of the answer, for the ids of its calls.
        """
        chat: Any = self.prompts[-1]
        last = chat[-1] if self.ending.get("continue_final_message") else None
        end = texts.prompt_end(token_ids, 0 if last is None else 4 * len(str(last)))
        thinks = last is not None and not last.get("content")
        return ResponseParser(
            form,
            end,
            self.tools,
            name,
            one_call=self.one_call,
            goes_on_thinking=thinks,
            is_loose=self.forced is None,  # what is forced or held to a schema is so in the model's own format alone
        )

    def response_format(self, texts: ModelTexts) -> ResponseFormat | None:
        """Return the format by which the answer is parsed; None if all of it is text: so is what a grammar of the
        request's own has made, whatever the prompt opens."""
        if not self.is_chat or (self.params.grammar is not None and self.forced is None):
            return None
        return texts.response_format(has_tools=bool(self.tools))


def _check_infill(llm: LLM, param: str) -> None:
    """Raise RequestBodyError, of a field of the body, if the model cannot fill in the middle."""
    try:
        _ = llm.infill_format
    except PromptError as error:
        raise RequestBodyError(str(error), param) from None


def check_template_options(options: Mapping[str, Any]) -> None:
    """Raise RequestBodyError if an option is a parameter of `apply_chat_template`."""
    if wrong := next((option for option in options if option in _OF_RENDERING), None):
        raise RequestBodyError(
            f"chat_template_kwargs sets {wrong!r}, which is no option of a template. Leave it out.",
            param="chat_template_kwargs",
        )


class CompletionOptions(GenerationBody):
    """The fields of both chats and completions."""

    max_tokens: Count | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None

    def common(self) -> dict[str, Any]:
        """Return what both have of a CompletionRequest: how prompts are encoded, and what is returned in what form.

        Raises:
            RequestBodyError: two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestBodyError("stream_options needs stream to be true. Leave it out.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestBodyError(
                "prompt_logprobs are there when the answer is, so they are not streamed. Leave out one of them.",
                param="prompt_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestBodyError(
                "truncate_prompt_tokens is 0, which leaves no prompt. Give 1 or more, or -1.", "truncate_prompt_tokens"
            )
        returned = Returned(self.prompt_logprobs, bool(self.return_token_ids), bool(self.return_tokens_as_token_ids))
        return {
            "stream": bool(self.stream),
            "stream_options": self.stream_options or StreamOptions(),
            "special": self.add_special_tokens,
            "truncate": self.truncate_prompt_tokens,
            "request_id": self.request_id,
            "echo": bool(self.echo),
            "returned": returned,
        }

    def params(self, own: Mapping[str, Any], **others: Any) -> SamplingParams:
        given = {kind: getattr(self, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
        guided = {f"guided_{kind}": None if value is None else (kind, value) for kind, value in given.items()}
        forms = {"response_format": self.response_format, "structured_outputs": self.structured_outputs}
        return super().params(own, grammar=grammar_of({**forms, **guided}), **others)


class Tool(TypedDict):
    """A tool."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Annotated[Tool, WrapValidator(take_tool)]], Field(fail_fast=True)]


class ChosenName(BodyPart):
    """The name of a function."""

    name: str


class ChosenTool(BodyPart):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenName


def with_read_calls(message: dict[str, Any], param: str = "messages") -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects. Raises RequestBodyError if a call is malformed."""
    try:
        calls = read_calls(message.get("tool_calls") or [])
    except PromptError as error:
        raise RequestBodyError(str(error), param) from None
    return {"content": None, **message, "tool_calls": calls} if calls else message


class ChatBody(CompletionOptions):
    """The body of a chat."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Literal["auto", "none", "required"] | ChosenTool | None, BeforeValidator(check_choice)] = (
        Field(
            None,
            description='\'auto\', \'none\', \'required\', or {"type": "function", "function": {"name": ...}}',
        )
    )
    parallel_tool_calls: bool | None = None

    def request(self, context_length: int, own: Mapping[str, Any], kept: object = None) -> CompletionRequest:
        """Return the request. Raises RequestBodyError.

        Args:
            context_length: of the target.
            own: the options of sampling that the model recommends, for what the body leaves out.
            kept: responses that are kept, which are no matter of this form.
        """
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RequestBodyError(
                "max_completion_tokens and max_tokens differ. Give one of them.", param="max_completion_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestBodyError(
                "top_logprobs needs logprobs to be true. Set it, or leave top_logprobs out.", "logprobs"
            )
        params = self.params(
            own,
            max_tokens=self.max_completion_tokens or self.max_tokens or context_length,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
        choice = self.tool_choice
        if choice not in (None, "none") and self.tools is None:
            raise RequestBodyError("tool_choice needs tools. Give them, or leave it out.", param="tool_choice")
        tools = () if self.tool_choice == "none" else tuple(offered_tools(self.tools))
        name = choice.function.name if isinstance(choice, ChosenTool) else None
        return CompletionRequest(
            CHAT_URL,
            self.model,
            [list(map(with_read_calls, self.messages))],
            params,
            **self.common(),
            template_options=with_effort(self.chat_template_kwargs, self.reasoning_effort),
            ending=self._ending(),
            tools=tools,
            one_call=self.parallel_tool_calls is False,
            forced=Forced.by(choice if isinstance(choice, str) else None, name, tools, params.grammar),
            ignored=(*self.ignored, *ignored_tools(self.tools)),
        )

    def _ending(self) -> dict[str, bool]:
        """Return how the prompt ends. Raises RequestBodyError."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestBodyError(
                "continue_final_message and add_generation_prompt are both true. Leave one of them out.",
                "continue_final_message",
            )
        continued = {"continue_final_message": True} if self.continue_final_message else {}
        return continued | ({"add_generation_prompt": False} if self.add_generation_prompt is False else {})


def with_effort(options: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return variables of the chat template, with how much the model thinks if that is given."""
    return {**(options or {}), **({} if effort is None else {"reasoning_effort": effort})}


class CompletionBody(CompletionOptions):
    """The body of a completion."""

    prompt: (
        str
        | Annotated[Strings, Field(min_length=1)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    ) = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        union_mode="left_to_right",
    )
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="a whole number of 1 or more")
    best_of: Count | None = None
    logprobs: TopLogprobs | None = Field(
        None, description=f"a whole number in 0..{MAX_TOP_LOGPROBS}: how many of the most probable tokens to list"
    )

    def request(self, context_length: int, own: Mapping[str, Any], kept: object = None) -> CompletionRequest:
        """Return the request; arguments as of `ChatBody`. Raises RequestBodyError."""
        echoed = self.echo and self.logprobs is not None
        if self.stream and echoed:
            raise RequestBodyError(
                "logprobs of an echoed prompt are there when the answer is, so they are not streamed. Leave out "
                "stream, echo or logprobs.",
                param="echo",
            )
        if self.max_tokens == 0 and not self.echo:
            raise RequestBodyError("max_tokens is 0, but must be 1 or more without echo. Correct it.", "max_tokens")
        of_prompt = [each for each in (self.logprobs if echoed else None, self.prompt_logprobs) if each is not None]
        params = self.params(
            own,
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else max(self.max_tokens, 1),
            logprobs=self.logprobs,
            prompt_logprobs=max(of_prompt, default=None),
        )
        if self.best_of not in (None, params.n):
            raise RequestBodyError("best_of is not supported, other than equal to n. Leave it out.", param="best_of")
        prompts: Any = self.prompt
        alone = isinstance(prompts, str) or isinstance(prompts[0], int)
        return CompletionRequest(
            COMPLETIONS_URL,
            self.model,
            self._with_suffix([prompts] if alone else prompts),
            params,
            "prompt",
            **self.common(),
            only_prompt=self.max_tokens == 0,
            ignored=self.ignored,
        )

    def _with_suffix(self, prompts: list[Any]) -> list[Any]:
        """Return the prompts; with the suffix, if there is one. Raises RequestBodyError where that cannot be."""
        if not self.suffix:
            return prompts
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise RequestBodyError("suffix needs a prompt of text, but it is token ids. Give text.", "suffix")
        for name, free in (("echo", False), ("truncate_prompt_tokens", None), ("add_special_tokens", True)):
            if (value := getattr(self, name)) not in (None, free):
                raise RequestBodyError(f"{name} is {value}, which suffix does not allow. Leave one of them out.", name)
        return [Infill(prompt, self.suffix) for prompt in prompts]


def parse_body(url: str, content: object, context_length: int) -> CompletionRequest:
    """Parse a body, with the default options of SamplingParams for what it leaves out.

    Args:
        url: CHAT_URL or COMPLETIONS_URL.
        content: as of `validated`.
        context_length: of the target.

    Raises:
        RequestBodyError: naming the field that is missing, malformed, or unsupported.
    """
    model: type[ChatBody | CompletionBody] = ChatBody if url == CHAT_URL else CompletionBody
    return validated(model, content).request(context_length, {})


def with_seed(request: CompletionRequest, seed: int) -> CompletionRequest:
    """Return the request with this seed if it has none."""
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=seed))
