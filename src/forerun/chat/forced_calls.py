"""Calls that a request forces, and grammars for calls, required or by their schemas, in the format of a family.

A file of `families/` says how a call is written (`forced`): `call` with the places {name} and {arguments}; `trigger`,
its beginning, before which text is free where no call is required; what stands `between` calls; where the arguments are
not JSON, each `argument` with {key} and {value}, the `separator` between them, and how a `string` is written; what may
come `before` calls, and `otherwise` in their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from forerun.chat.response_format import ERRORS, REASONING, ResponseFormat, declared
from forerun.config import JSON_OBJECT, JSON_SCHEMA, Grammar
from forerun.errors import GrammarError, RequestBodyError
from forerun.sampling.grammar import Grammars
from forerun.sampling.json_schemas import readable
from forerun.sampling.schema_rewriting import Work

_GUIDANCE = "x-guidance"
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_FREE = {"{text}": "TEXT", "{free}": "FREE", "{thought}": "THOUGHT"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_BUDGET = 4096
"""Tokens of the thinking before a required call, where a request does not say how many."""
_CHARACTERS = 3
"""Of a token of thinking, rather too few: a grammar that counts tokens cannot be rolled back."""


def call_grammar(
    form: ResponseFormat,
    tools: Seq[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    name: str | None = None,
    is_required: bool = True,
    is_thinking: bool = False,
    one_call: bool = False,
    answer: Mapping[str, Any] | None = None,
    budget: int = _BUDGET,
) -> str | None:
    """Return a grammar for `Grammar.lark`: calls by the tools' schemas; None if no grammar tells the family's calls
    from its text. Raises GrammarError if no tool has the name.

    Calls that are required begin at once, or behind the thinking. Before others text is free.

    Args:
        form: how the model writes. tools: OpenAI's definitions.
        special: text -> id of the tokens that are no text to llguidance (`Grammars.special`).
        name: of the tool that is called, once. None: any tools, any number of times.
        is_thinking: whether the prompt opens thinking, which must end before a call.
        is_required: False if an answer without calls is allowed, too. one_call: there is one call at most.
        answer: schema of the JSON that stands in the place of all free text, but for thinking; None: text is free.
        budget: tokens, about, of the thinking before a call that is required.
    """
    written = form.forced or {}
    rules = _Rules(special)
    functions = [each for tool in tools if name in (None, (each := tool.get("function", tool))["name"])]
    if not functions:
        raise GrammarError(f"No tool is named {name!r}. Give its definition, or the name of another tool.")
    trigger = written.get("trigger", "")
    otherwise = written.get("otherwise", "{free}" if trigger else None)
    if not written or (otherwise is None and not is_required):
        return None
    call = rules.add(" | ".join(_call(rules, written, function, trigger) for function in functions))
    free, blank = ("", " /\\n{0,2}/") if is_required or answer is not None else ("{free}", "")
    start = f"{rules.sequence(free + trigger) if trigger else ''} {call}"
    if name is None and not one_call:
        start += _more_calls(rules, written, trigger, call)
    if not is_required and otherwise is not None:
        places = {} if answer is None else dict.fromkeys(_FREE, rules.add(_json(answer)))
        start = f"({start} | {rules.sequence(otherwise, places)})"
    opens, closes = _thinking_marks(form)
    begun = "" if is_thinking else rules.sequence(free + opens)
    thought = f"{begun} {rules.sequence('{thought}' + closes)}{blank}" if opens else ""
    if thinking := thought or rules.sequence(written.get("before", "")):
        start = f"({thinking}){'' if is_thinking else '?'} {start}"
    length = f"{{0,{_CHARACTERS * budget}}}" if is_required else "*"
    texts = ["TEXT: /(.|\\n)*/", f"THOUGHT: /(.|\\n){length}/", f"FREE: /(.|\\n)*/{_unlike(trigger, opens)}"]
    return "\n".join([f"start: {start}", *texts, *rules.lines])


def _more_calls(rules: _Rules, written: Mapping[str, Any], trigger: str, call: str) -> str:
    """Return an expression for calls after the first; empty where the family has one at most."""
    if "between" not in written:
        return ""
    between = rules.sequence(written["between"])
    # many a model writes it before it ends, too, and could then do nothing but call again
    ends = f" ({between})?" if between else ""
    return f" ({rules.sequence(written['between'] + trigger)} {call})*{ends}"


def _thinking_marks(form: ResponseFormat) -> tuple[str, str]:
    """Return what opens and closes thinking; empty without, or if that is no fixed text."""
    fields = [region.field for region in form.regions if region.kind == REASONING and "open" in region.field]
    return (fields[0]["open"], fields[0]["close"]) if fields else ("", "")


def _unlike(*marks: str) -> str:
    """Return what is added to a pattern of free text that spells none of these marks by other tokens either: the
    parser would read them."""
    patterns = [re.escape(mark).replace("\n", "n") for mark in marks if mark]  # behind its backslash
    return "".join(f" & ~/(.|\\n)*{pattern}(.|\\n)*/" for pattern in patterns)


class _Rules:
    """The rules of a grammar, and how text is written in it."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self.lines = [""]

    def add(self, expression: str, attribute: str = "") -> str:
        """Add a rule; return its name."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {expression}")
        return name

    def sequence(self, template: str, places: Mapping[str, str] | None = None) -> str:
        """Return an expression for a template, whose places hold other expressions.

        Text that is free ends where what follows it first comes: at a special token, or else by a lazy rule.
        """
        places = {**_FREE, **(places or {})}
        items = [""]
        marks = sorted([*places, *self.special], key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, marks))})", template):
            if part in places or part in self.special:
                items.append(places[part] if part in places else f"<[{self.special[part]}]>")
            elif part and items[-1] in _FREE.values():
                items[-1] = self.add(f"{items[-1]} {json.dumps(part)}", "[lazy]")
            elif part:
                items.append(json.dumps(part))
        return " ".join(items)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, _GUIDANCE: {**_JSON, **schema.get(_GUIDANCE, {})}})}"


def _call(rules: _Rules, written: Mapping[str, Any], function: Mapping[str, Any], trigger: str) -> str:
    """Return an expression for what follows the trigger of a call."""
    schema = function.get("parameters") or _NO_PARAMETERS
    arguments = _json(schema) if "argument" not in written else _by_argument(rules, written, schema)
    call = written["call"].replace("{name}", function["name"]).removeprefix(trigger)
    return rules.sequence(call, {"{arguments}": arguments and rules.add(arguments)})


def _by_argument(rules: _Rules, written: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return an expression for arguments that are written one by one: those that are required come first."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions", _GUIDANCE) if key in schema}
    items = []
    for key in sorted(properties, key=lambda key: key not in required):
        types = declared(properties[key])
        choices = properties[key].get("enum")
        value = _json(shared | properties[key])
        if _is_text(written, types, choices):
            value = "TEXT" if choices is None else f"({' | '.join(json.dumps(str(choice)) for choice in choices)})"
            value = rules.sequence(written["string"], {"{text}": value}) if "string" in written else value
        items.append(rules.add(rules.sequence(written["argument"], {"{key}": json.dumps(key), "{value}": value})))
    separator = json.dumps(written.get("separator", ""))
    num_required = sum(key in required for key in properties)
    rest = [f" ({separator} {item})?" for item in items]
    if num_required:
        return f" {separator} ".join(items[:num_required]) + "".join(rest[num_required:])
    return f"({' | '.join(item + ''.join(rest[at + 1 :]) for at, item in enumerate(items))})?" if items else ""


def _is_text(written: Mapping[str, Any], types: set[str], choices: Seq[Any] | None) -> bool:
    """Return whether the value of an argument is written as text, in place of JSON. types, choices: of its schema."""
    if "string" in written:
        return types == {"string"} or (not types and bool(choices) and {*map(type, choices or ())} == {str})
    return "separator" not in written and (not types or "string" in types)


@dataclass(frozen=True, slots=True)
class Forced:
    """Calls that a grammar forces.

    Attributes:
        name: of the tool that is called, once; None: any tools, any number of times.
        is_required: False: there may be no call, but those that are made follow their schemas.
        answer: schema of an answer without calls; None if that is free text.
        budget: tokens of the thinking before a call that is required.
    """

    name: str | None = None
    is_required: bool = True
    answer: dict[str, Any] | None = None
    budget: int = _BUDGET

    @classmethod
    def by(
        cls,
        choice: str | None,
        name: str | None,
        tools: Seq[Mapping[str, Any]],
        grammar: Grammar | None,
        budget: int | None = None,
    ) -> Forced | None:
        """Return what a request forces; None if nothing, or if all of the answer follows the grammar.

        Args:
            choice: "required" or "any"; others force no call.
            name: of the tool that must be called.
            tools: of which some may be strict.
            grammar: of an answer without calls. A call that is required has none beside it.
            budget: tokens of thinking; None if the request does not say.

        Raises:
            RequestBodyError: a call is required, but there are no tools.
        """
        is_required = name is not None or choice in ("required", "any")
        if is_required and not tools:
            raise RequestBodyError("tool_choice asks for a call, but there are no tools. Give some.", "tool_choice")
        if is_required:
            return cls(name, budget=budget or _BUDGET)
        if grammar is not None and tools and grammar.kind in (JSON_OBJECT, JSON_SCHEMA):
            return cls(None, False, json.loads(grammar.text or '{"type": "object"}'))
        is_strict = any(tool["function"].get("strict") for tool in tools)
        return cls(None, False) if is_strict and grammar is None else None

    def grammar(
        self,
        form: ResponseFormat,
        tools: Seq[Mapping[str, Any]],
        grammars: Grammars,
        is_thinking: bool,
        one_call: bool,
        max_tokens: int,
    ) -> Grammar:
        """Return the answer's grammar; grammars: of the engine. Raises RequestBodyError if there is none.

        Thinking has half of max_tokens at most.
        """
        param = "tool_choice" if self.is_required else "tools"
        try:
            tools, warnings = _readable(tools, self.name)
            answer, more = readable(self.answer)
            text = call_grammar(
                form,
                tools,
                grammars.special(),
                name=self.name,
                is_required=self.is_required,
                is_thinking=is_thinking,
                one_call=one_call,
                answer=answer,
                budget=min(self.budget, max(max_tokens // 2, 1)),
            )
            if text is not None:
                return replace(Grammar.lark(text), field=param, warnings=(*warnings, *more))
        except GrammarError as error:
            raise RequestBodyError(str(error), param) from None
        except ERRORS:
            raise RequestBodyError("The parameters of a tool are no JSON schema. Correct them.", "tools") from None
        raise RequestBodyError(
            f"{param} cannot be held to: no grammar tells this model's calls from its text. Leave tool_choice, "
            "strict and response_format out.",
            param,
        )


def _readable(tools: Seq[Mapping[str, Any]], name: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return tools with schemas as `readable` returns them, and the warnings of those that may be called. name: of the
    only one, if there is one."""
    made = []
    warnings = []
    work = Work()
    for tool in tools:
        function = tool["function"]
        parameters, told = readable(function.get("parameters"), work)
        made.append({**tool, "function": {**function, "parameters": parameters}})
        if name in (None, function["name"]):
            warnings += [f"{function['name']}: {each}" for each in told]
    return made, warnings


def chat_tools(tools: Seq[Any] | None, parameters: str = "parameters") -> tuple[dict[str, Any], ...]:
    """Return tools as a chat has them. parameters: the field of their schema."""
    names = {"name": "name", "description": "description", parameters: "parameters", "strict": "strict"}
    functions = ({new: tool[old] for old, new in names.items() if tool.get(old) is not None} for tool in tools or ())
    return tuple({"type": "function", "function": function} for function in functions)
