"""Prompts as text, token ids or chats, one or many, and their encoding with the tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from copy import copy
from itertools import count
from numbers import Number
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from forerun.chat.infill import Infill
from forerun.chat.messages import check_roles, forms_of, key_to_continue, read_message
from forerun.engine.request_checks import check_length, check_text, excess_characters, naming_prompt
from forerun.errors import ConfigError, ContextLengthError, PromptError
from forerun.models import LanguageModel
from forerun.utils.children import RENDERERS, TaskLimitError
from forerun.utils.json_file import read_template
from forerun.utils.library_tokenizer import writes_chats_itself
from forerun.utils.vocabulary import encode_text

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Seq[int] | Seq[Message] | Mapping[str, Any] | Infill"
PROMPT_KEYS = ("prompt_token_ids", "prompt")
_PRINTED_PART = "{'type': 'text'"
"""What of a list of parts stands in a prompt where a template prints it, in place of reading it."""
_RENDER_SECONDS = 2.0
"""Processor time of a chat template; most take a thousandth."""
TEMPLATE_OPTIONS = ("chat_template", "add_generation_prompt", "continue_final_message", "tools", "documents")
"""Options of vLLM's `chat` that the chat template is given."""


def split_prompts(prompts: Prompt | Seq[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether there was a single one: with the content of vLLM's dictionaries.

    Raises:
        PromptError: that is ambiguous, or a dictionary holds anything else.
    """
    if isinstance(prompts, (str, Infill)):
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
            if isinstance(chat, (str, Infill)) or not all(isinstance(message, Mapping) for message in chat):
                raise PromptError(
                    'A chat is a list of messages such as {"role": "user", "content": "Hello"}. Text and token ids '
                    "are for generate."
                )
    return split, single


def with_template(tokenizer: Any, given: str | Path) -> Any:
    """Return a tokenizer with another chat template.

    given: the text of the template, or its file.

    Raises:
        ConfigError: the file cannot be read, or the tokenizer writes chats without a template.
    """
    template = given if isinstance(given, str) and "{" in given else read_template(given, ConfigError)
    if tokenizer is None or writes_chats_itself(tokenizer):
        raise ConfigError(
            "A chat template was given, but the model has no tokenizer that reads one. Leave chat_template out."
        )
    made = copy(tokenizer)
    made.chat_template = template
    return made


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
        text = _rendered(tokenizer, list(map(read_message, prompt, count())), template_options, name)
        check_text(text, PromptError, "The chat")
    if model is not None and (excess := excess_characters(text, tokenizer, model, says_why=True)):
        raise ContextLengthError(f"The prompt has {excess}. Shorten the prompt.")
    return encode_text(tokenizer, text, special=isinstance(prompt, str) if special is None else special)


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], given: Mapping[str, Any], name: str) -> str:
    """Return a chat as its template writes it, in the first form of the messages of which each leaves a trace."""
    template = _template_of(tokenizer, given, name)
    check_roles(messages, template)
    options = _checked_options(given, "" if writes_chats_itself(tokenizer) else template, name)
    asked = options.pop("continue_final_message", False)
    open_key = key_to_continue(messages, asked) if asked else None
    failure: Exception | None = None
    lost: list[int] = []
    own = sum(str(each["content"]).count(_PRINTED_PART) for each in messages)
    for number, form in enumerate(forms_of(messages, template)):
        try:
            text, missing = _render(tokenizer, form, options, open_key, is_traced=True, is_first=not number)
        except TaskLimitError as error:
            raise PromptError(
                f"The chat template of {name} {error} for these messages. Send fewer, or take another template."
            ) from None
        except Exception as error:  # a template may raise anything
            failure = failure or error
        else:
            is_printed = isinstance(form[-1].get("content"), list) and text.count(_PRINTED_PART) > own
            if not missing and not is_printed:
                return text
            lost = lost or missing
    if lost:
        raise PromptError(
            f"Message {lost[0]} of the chat, of the role {messages[lost[0]]['role']!r}, leaves no trace in the prompt, "
            f"or its calls do not, or thinking that is to be continued: the chat template of {name} does not read it. "
            "Leave it out, put its text into another message, or take another template."
        )
    raise PromptError(f"The chat template of {name} refused the messages: {failure}") from failure


def _template_of(tokenizer: Any, given: Mapping[str, Any], name: str) -> str:
    """Return the text of a template that is given, as such or by its name, or else that of the tokenizer."""
    if (chosen := given.get("chat_template")) is None:
        return check_template(tokenizer, name, given.get("tools"))
    if not isinstance(chosen, str):
        raise PromptError(f"chat_template is of type {type(chosen).__name__}, but must be text. Correct it.")
    named = getattr(tokenizer, "chat_template", None)
    return str(named.get(chosen, chosen)) if isinstance(named, Mapping) else chosen


def _checked_options(given: Mapping[str, Any], template: str, name: str) -> dict[str, Any]:
    """Return what a template is given, with an opening of the answer unless the last message is continued.

    template: empty if it is unknown what it reads.

    Raises:
        PromptError: both are asked for, or what the template does not read.
    """
    continues = bool(given.get("continue_final_message"))
    if continues and given.get("add_generation_prompt"):
        raise PromptError(
            "continue_final_message and add_generation_prompt are both true: the last message cannot be continued and "
            "followed by another one. Leave one of them out."
        )
    options = {"add_generation_prompt": not continues, **given}
    needed = {"tools": options.get("tools"), "documents": options.get("documents")}
    needed["add_generation_prompt"] = not options["add_generation_prompt"] and not continues
    if odd := next((option for option, value in needed.items() if value and template and option not in template), None):
        raise PromptError(f"The chat template of {name} does not read {odd}: it would be ignored. Leave it out.")
    return options


def _render(
    tokenizer: Any,
    messages: Seq[Message],
    given: Mapping[str, Any],
    open_key: str | None = None,
    *,
    is_traced: bool = False,
    is_first: bool = True,
) -> tuple[str, list[int]]:
    """Return the text of a chat, and the indices of messages that leave no trace in it. A child process makes it, since
    a template is a program.

    Args:
        open_key, is_traced: as of the process's `render_template`.
        is_first: of the forms of these messages; others have less time.

    Raises:
        TaskLimitError, Exception: as `apply_template`.
    """
    if writes_chats_itself(tokenizer):
        more = {} if open_key is None else {"continue_final_message": open_key}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given, **more)), []
    tools = given.get("tools")
    options = {**tokenizer.special_tokens_map, **given}
    options.pop("chat_template", None)
    if tools is not None:
        from transformers.utils import get_json_schema

        options["tools"] = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
    arguments = {
        "template": _template_of(tokenizer, given, "the tokenizer"),
        "messages": [*messages],
        "given": options,
        "open_key": open_key,
        "is_traced": is_traced,
    }
    fields, text = RENDERERS.perform("render", arguments, seconds=_RENDER_SECONDS if is_first else _RENDER_SECONDS / 8)
    return text.decode("utf-8", "surrogatepass"), fields["lost"]


def apply_template(tokenizer: Any, messages: Seq[Message], **given: Any) -> str:
    """Return the text of `tokenizer.apply_chat_template`.

    Raises:
        TaskLimitError: it takes too much time or memory.
        Exception: what the template, or the tokenizer's class, raises.
    """
    asked = given.pop("continue_final_message", None)
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return _render(tokenizer, plain, given, "content" if asked is True else asked or None)[0]


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
            "the template of this one beside its files (chat_template.jinja), give one (--chat-template), or give the "
            "prompt as text."
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
