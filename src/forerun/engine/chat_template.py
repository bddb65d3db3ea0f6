"""Prompts as text, token ids or chats, one or many, and their encoding with the tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from inspect import unwrap
from numbers import Number
from types import MappingProxyType
from typing import Any, TypeAlias

from forerun.engine.request_checks import check_length, check_text, excess_characters, naming_prompt
from forerun.errors import ContextLengthError, PromptError
from forerun.models import LanguageModel
from forerun.utils.children import RENDERERS, TaskLimitError
from forerun.utils.vocabulary import encode_text

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Seq[int] | Seq[Message] | Mapping[str, Any]"
PROMPT_KEYS = ("prompt_token_ids", "prompt")
_RENDER_SECONDS = 2.0
"""Processor time of a chat template; most take a thousandth."""
TEMPLATE_OPTIONS = ("chat_template", "add_generation_prompt", "continue_final_message", "tools", "documents")
"""Options of vLLM's `chat` that the chat template is given."""


def split_prompts(prompts: Prompt | Seq[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether there was a single one: with the content of vLLM's dictionaries.

    Raises:
        PromptError: that is ambiguous, or a dictionary holds anything else.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if _is_prompt(prompts):
        return [_content(prompts)], True
    if isinstance(prompts, (Mapping, bytes, bytearray, memoryview)) or not isinstance(prompts, Seq):
        raise _unreadable(prompts)
    if not prompts:
        raise PromptError("The prompt is empty: there is nothing to continue. Give at least one token.")
    first = prompts[0]
    if _is_token_id(first) or isinstance(first, Number) or (isinstance(first, Mapping) and not _is_prompt(first)):
        return [prompts], True  # type: ignore[list-item]
    return [_content(each) if _is_prompt(each) else each for each in prompts], False  # type: ignore[misc]


def one_prompt(prompt: Prompt) -> Prompt:
    """Return a prompt as `split_prompts` does. Raises PromptError as that, or if there are several."""
    split, single = split_prompts(prompt)
    if not single:
        raise PromptError(f"This takes one prompt, but got a list of {len(split)}. Use generate for several.")
    return split[0]


def split_chats(messages: Seq[Message] | Seq[Seq[Message]]) -> tuple[list[Prompt], bool]:
    """Return chats as `split_prompts` does. Raises PromptError as that, and for what is no list of messages."""
    split, single = split_prompts(messages)
    for index, chat in enumerate(split):
        with naming_prompt(index, len(split)):
            if isinstance(chat, str) or not all(isinstance(message, Mapping) for message in chat):
                raise PromptError(
                    'A chat is a list of messages such as {"role": "user", "content": "Hello"}. Text and token ids '
                    "are for generate."
                )
    return split, single


def template_of(given: Mapping[str, Any] | None, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a chat template is given, and the options that are not for it."""
    template = {name: options[name] for name in TEMPLATE_OPTIONS if options.get(name) is not None}
    sampling = {name: value for name, value in options.items() if name not in TEMPLATE_OPTIONS}
    return {**template, **(given or {})}, sampling


def encode(
    prompt: Prompt,
    tokenizer: Any,
    name: str,
    template_options: Mapping[str, Any] = MappingProxyType({}),
    *,
    special: bool | None = None,
    model: LanguageModel | None = None,
) -> list[int]:
    """Encode one prompt to token ids.

    Args:
        tokenizer: None if the model has none; then only token ids can be served.
        name: the model's, for messages.
        template_options: what a chat's template is given beside the messages.
        special: with the tokens that the tokenizer puts around a text; None: of a text, and not of a chat.
        model: the one that is to continue the prompt. What its context cannot hold is refused before it is encoded,
            which takes a while.

    Raises:
        ContextLengthError: there are as many token ids, or more characters than so many tokens can have.
        PromptError: empty, or of a type or of several that this model cannot read. The message quotes nothing of the
            prompt.
    """
    if not isinstance(prompt, Seq) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise _unreadable(prompt)
    if not prompt:
        raise PromptError("The prompt is empty: there is nothing to continue. Give at least one token.")
    if not isinstance(prompt, str) and not all(isinstance(entry, Mapping) for entry in prompt):
        if model is not None:  # before millions of them are looked at
            check_length(len(prompt), model)
        odd = next((index for index, entry in enumerate(prompt) if not _is_token_id(entry)), None)
        if odd is None:
            return [int(entry) for entry in prompt]  # type: ignore[arg-type]
        raise PromptError(
            f"The prompt holds an entry of type {type(prompt[odd]).__name__} at index {odd}, which is no token id. "
            "Give whole numbers only, or text, or messages only."
        )
    if tokenizer is None:
        raise PromptError(f"{name} has no tokenizer, so text cannot be read. Pass token ids.")
    if isinstance(prompt, str):
        text = prompt
        check_text(text, PromptError, "The prompt")
    else:
        messages = [_message(entry, index) for index, entry in enumerate(prompt)]
        if "chat_template" not in template_options:
            check_template(tokenizer, name, template_options.get("tools"))
        text = _rendered(tokenizer, messages, {"add_generation_prompt": True, **template_options}, name)
        check_text(text, PromptError, "The chat")
    if model is not None and (excess := excess_characters(text, tokenizer, model, says_why=True)):
        raise ContextLengthError(f"The prompt has {excess}. Shorten the prompt.")
    return encode_text(tokenizer, text, special=isinstance(prompt, str) if special is None else special)


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], given: Mapping[str, Any], name: str) -> str:
    """Return a chat as its template writes it. Templates of models that also see may read lists of parts alone, and
    leave out or refuse a content that is text: they are given lists."""
    said = next((str(each["content"] or "").strip() for each in reversed(messages) if each["role"] == "user"), "")
    text = None
    failure = None
    try:
        text = apply_template(tokenizer, messages, **given)
    except TaskLimitError as error:
        raise PromptError(
            f"The chat template of {name} {error} for these messages. Send fewer, or take another template."
        ) from None
    except Exception as error:  # a template may raise anything
        failure = error
    if text is None or said not in text:
        in_parts = [{**each, "content": [{"type": "text", "text": each["content"] or ""}]} for each in messages]
        with suppress(Exception):
            listed = apply_template(tokenizer, in_parts, **given)
            if said in listed and "{'type': 'text'" not in listed:  # a list that was printed
                return listed
    if text is None:
        raise PromptError(f"The chat template of {name} refused the messages: {failure}") from failure
    return text


def apply_template(tokenizer: Any, messages: Seq[Message], **given: Any) -> str:
    """Return the text of `tokenizer.apply_chat_template`, which a child process makes: a template is a program.

    Raises:
        TaskLimitError: it takes too much time or memory.
        Exception: what the template, or the tokenizer's class, raises.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import get_json_schema

    if unwrap(type(tokenizer).apply_chat_template) is not PreTrainedTokenizerBase.apply_chat_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))  # a library's, of no template
    tools = given.get("tools")
    template = tokenizer.get_chat_template(given.get("chat_template"), tools)
    others = {key: value for key, value in given.items() if key not in ("chat_template", "tools")}
    options = {**tokenizer.special_tokens_map, **others}
    if tools is not None:
        options["tools"] = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
    arguments = {"template": template, "messages": [*messages], "given": options}
    _, text = RENDERERS.perform("render", arguments, seconds=_RENDER_SECONDS)
    return text.decode("utf-8", "surrogatepass")


def _message(entry: Any, index: int) -> dict[str, Any]:
    """Return a message as chat templates read it, with its parts of text joined."""
    message = dict(entry)
    if "role" not in message or "content" not in message:
        raise PromptError(f"Message {index} of the chat needs both 'role' and 'content'.")
    content = message["content"]
    if isinstance(content, Seq) and not isinstance(content, str):
        if not all(map(_is_text, content)):
            raise PromptError(
                f"The content of message {index} of the chat has parts that are not text. Pictures, sound and files "
                'are not read: give {"type": "text", "text": "..."} alone.'
            )
        message["content"] = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise PromptError(
            f"The content of message {index} of the chat is of type {type(content).__name__}. "
            "Give text, or a list of parts of text."
        )
    return message


def _is_text(part: Any) -> bool:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    return kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str)


def check_template(tokenizer: Any, name: str, tools: Seq[Any] | None = None) -> str:
    """Return the chat template by which messages become text: of a list of named ones "tool_use" if there are tools,
    else "default".

    Args:
        tokenizer: None if the model has none.
        tools: that the template is given.

    Raises:
        PromptError: there is no template, or none of these names.
    """
    if not (templates := getattr(tokenizer, "chat_template", None)):
        raise PromptError(
            f"{name} has no chat template, so a chat cannot be put to it. Take a model that was made for chats, put "
            "the template of this one beside its tokenizer (chat_template.jinja), or give the prompt as text."
        )
    if not isinstance(templates, Mapping):
        return str(templates)
    chosen = templates.get("tool_use") if tools is not None else None  # as `apply_chat_template` chooses
    if (template := chosen or templates.get("default")) is None:
        raise PromptError(
            f"{name} has chat templates named {', '.join(sorted(templates))}, and none named default. Give one of "
            "these names as chat_template."
        )
    return str(template)


def _is_prompt(entry: object) -> bool:
    return isinstance(entry, Mapping) and any(key in entry for key in PROMPT_KEYS)


def _content(prompt: Any) -> Prompt:
    """Return the token ids in a dictionary, or else the text. Raises PromptError if it holds anything else."""
    if odd := sorted(str(key) for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None):
        raise PromptError(
            f"A prompt has {', '.join(odd)}, but may have {' or '.join(PROMPT_KEYS)} alone: forerun reads text and "
            "token ids."
        )
    content: Prompt = next(prompt[key] for key in PROMPT_KEYS if key in prompt)
    return content


def _is_token_id(entry: object) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, bool)


def _unreadable(prompt: object) -> PromptError:
    remedy = " Decode the bytes first." if isinstance(prompt, (bytes, bytearray, memoryview)) else ""
    if hasattr(prompt, "tolist"):
        remedy = " Of a tensor, give .tolist()."
    if isinstance(prompt, Mapping):
        remedy = ' A dictionary has "prompt" or "prompt_token_ids"; of a tokenizer\'s output, give input_ids as a list.'
    return PromptError(
        f"A prompt of type {type(prompt).__name__} cannot be read. "
        f"Give text, a list of token ids, a chat (a list of messages), or a list of these.{remedy}"
    )
