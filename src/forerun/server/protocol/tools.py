"""Calls of tools that a request asks for: whether the model can make them, and how they are forced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.chat.contents import ERRORS
from forerun.chat.forced_calls import call_grammar
from forerun.chat.response_format import CALL, ResponseFormat
from forerun.config import JSON_OBJECT, JSON_SCHEMA, Grammar
from forerun.errors import GrammarError, RequestBodyError
from forerun.sampling.grammar.compile import Grammars


@dataclass(frozen=True, slots=True)
class Forced:
    """Calls that a grammar forces.

    Attributes:
        name: of the tool that is called, once; None: any tools, any number of times.
        is_required: False: there may be no call, but those that are made follow their schemas.
        answer: schema of an answer without calls; None if that is free text.
    """

    name: str | None = None
    is_required: bool = True
    answer: dict[str, Any] | None = None

    @classmethod
    def by(
        cls, choice: str | None, name: str | None, tools: Seq[Mapping[str, Any]], grammar: Grammar | None
    ) -> Forced | None:
        """Return what a request forces; None if nothing, or if all of the answer follows the grammar.

        Args:
            choice: "required" or "any"; others force no call.
            name: of the tool that must be called.
            tools: of which some may be strict.
            grammar: of an answer without calls. A call that is required has none beside it.

        Raises:
            RequestBodyError: a call is required, but there are no tools.
        """
        is_required = name is not None or choice in ("required", "any")
        if is_required and not tools:
            raise RequestBodyError("tool_choice asks for a call, but there are no tools. Give some.", "tool_choice")
        if is_required:
            return cls(name)
        if grammar is not None and tools and grammar.kind in (JSON_OBJECT, JSON_SCHEMA):
            return cls(None, False, json.loads(grammar.text or '{"type": "object"}'))
        is_strict = any(tool["function"].get("strict") for tool in tools)
        return cls(None, False) if is_strict and grammar is None else None

    def grammar(
        self,
        form: ResponseFormat,
        tools: Seq[Mapping[str, Any]],
        grammars: Grammars,
        *,
        is_thinking: bool,
        one_call: bool,
    ) -> Grammar:
        """Return the answer's grammar; grammars: of the engine. Raises RequestBodyError if there is none."""
        param = "tool_choice" if self.is_required else "tools"
        try:
            text = call_grammar(
                form,
                tools,
                grammars.special(),
                name=self.name,
                is_required=self.is_required,
                is_thinking=is_thinking,
                one_call=one_call,
                answer=self.answer,
            )
            if text is not None:
                return Grammar.lark(text)
        except GrammarError as error:
            raise RequestBodyError(str(error), param) from None
        except ERRORS:
            raise RequestBodyError("The parameters of a tool are no JSON schema. Correct them.", "tools") from None
        raise RequestBodyError(
            f"{param} cannot be held to: no grammar tells this model's calls from its text. Leave tool_choice, "
            "strict and response_format out.",
            param,
        )


def chat_tools(tools: Seq[Any] | None, names: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """Return tools as a chat has them. names: field of such a tool -> of a chat's."""
    functions = ({new: tool[old] for old, new in names.items() if tool.get(old) is not None} for tool in tools or ())
    return tuple({"type": "function", "function": function} for function in functions)


def check_calls(form: ResponseFormat | None, tokenizer: Any, param: str) -> None:
    """Raise RequestBodyError if the chat template does not carry tools, or calls in no known format."""
    carries = "tools" in str(getattr(tokenizer, "chat_template", None))
    if form is None or not carries or all(region.kind != CALL for region in form.regions):
        raise RequestBodyError(
            f"{param} cannot be used with this model: its chat template does not carry tools, or calls in a format "
            "that is not known. Leave it out, take a model that was made for tools, or give its response template.",
            param=param,
        )
