"""Grammars for calls that must be made, or that must follow their schemas, in the format of a family.

A file of `families/` says how a call is written (`forced`): `call` with the places {name} and {arguments}; `trigger`,
its beginning, before which text is free; what stands `between` calls; where the arguments are not JSON, each `argument`
with {key} and {value}, and the `separator` between them; what may come `before` calls, and `otherwise` in their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from forerun.chat.contents import declared
from forerun.chat.response_format import REASONING, ResponseFormat
from forerun.errors import GrammarError

_JSON = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}
_FREE = {"{text}": "TEXT", "{free}": "FREE"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


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
) -> str | None:
    """Return a grammar for `Grammar.lark`: free text until a call begins, then calls by the tools' schemas; None if no
    grammar tells the family's calls from its text.

    Args:
        form: how the model writes. tools: OpenAI's definitions.
        special: text -> id of the tokens that are no text to llguidance (`Grammars.special`).
        name: of the tool that is called, once. None: any tools, any number of times.
        is_thinking: whether the prompt opens thinking, which must end before a call.
        is_required: False if an answer without calls is allowed, too. one_call: there is one call at most.
        answer: schema of the JSON that stands in the place of all free text, but for thinking; None: text is free.

    Raises:
        GrammarError: no tool has the name.
    """
    written, rules = form.forced or {}, _Rules(special)
    functions = [each for tool in tools if name in (None, (each := tool.get("function", tool))["name"])]
    if not functions:
        raise GrammarError(f"No tool is named {name!r}. Give its definition, or the name of another tool.")
    trigger = written.get("trigger", "")
    otherwise = written.get("otherwise", "{free}" if trigger else None)
    if not written or (otherwise is None and not is_required):
        return None
    call = rules.add(" | ".join(_call(rules, written, function, trigger) for function in functions))
    free, blank = ("{free}", "") if answer is None else ("", " /\\n{0,2}/")
    start = f"{rules.sequence(free + trigger) if trigger else ''} {call}"
    if name is None and "between" in written and not one_call:
        start += f" ({rules.sequence(written['between'] + trigger)} {call})*"
    if not is_required and otherwise is not None:
        places = {} if answer is None else dict.fromkeys(_FREE, rules.add(_json(answer)))
        start = f"({start} | {rules.sequence(otherwise, places)})"
    opens, closes = _thinking_marks(form)
    thinking = rules.sequence(written.get("before", ""))
    if opens:
        begun = "" if is_thinking else rules.sequence(free + opens)
        thinking = f"{begun} {rules.sequence('{text}' + closes)}{blank}"
    # free text does not spell a mark by other tokens either: the parser would read it
    unlike = "".join(f" & ~/(.|\\n)*{re.escape(mark)}(.|\\n)*/" for mark in (trigger, opens) if mark)
    start = f"start: ({thinking}){'' if is_thinking else '?'} {start}" if thinking else f"start: {start}"
    return "\n".join([start, "TEXT: /(.|\\n)*/", f"FREE: /(.|\\n)*/{unlike}", *rules.lines])


def _thinking_marks(form: ResponseFormat) -> tuple[str, str]:
    """Return what opens and closes thinking; empty where nothing does."""
    fields = [region.field for region in form.regions if region.kind == REASONING]
    return next(((field["open"], field["close"]) for field in fields if "open" in field), ("", ""))


class _Rules:
    """The rules of a grammar, and how text is written in it."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special, self.lines = special, [""]

    def add(self, expression: str, attribute: str = "") -> str:
        """Add a rule; return its name."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {expression}")
        return name

    def sequence(self, template: str, places: Mapping[str, str] | None = None) -> str:
        """Return an expression for a template, whose places hold other expressions.

        Text that is free ends where what follows it first comes: at a special token, or else by a lazy rule.
        """
        places, items = {**_FREE, **(places or {})}, [""]
        marks = sorted([*places, *self.special], key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, marks))})", template):
            if part in places or part in self.special:
                items.append(places[part] if part in places else f"<[{self.special[part]}]>")
            elif part and items[-1] in ("TEXT", "FREE"):
                items[-1] = self.add(f"{items[-1]} {json.dumps(part)}", "[lazy]")
            elif part:
                items.append(json.dumps(part))
        return " ".join(items)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**_JSON, **schema})}"


def _call(rules: _Rules, written: Mapping[str, Any], function: Mapping[str, Any], trigger: str) -> str:
    """Return an expression for what follows the trigger of a call."""
    schema = function.get("parameters") or _NO_PARAMETERS
    arguments = _json(schema) if "argument" not in written else _by_argument(rules, written, schema)
    call = written["call"].replace("{name}", function["name"]).removeprefix(trigger)
    return rules.sequence(call, {"{arguments}": arguments and rules.add(arguments)})


def _by_argument(rules: _Rules, written: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return an expression for arguments that are written one by one: those that are required come first."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    shared = _JSON | {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    items = []
    for key in sorted(properties, key=lambda key: key not in required):
        types, choices = declared(properties[key]), properties[key].get("enum")
        value = f"%json {json.dumps(shared | properties[key])}"
        if "separator" not in written and (not types or "string" in types):
            value = "TEXT" if choices is None else f"({' | '.join(json.dumps(str(choice)) for choice in choices)})"
        items.append(rules.add(rules.sequence(written["argument"], {"{key}": json.dumps(key), "{value}": value})))
    separator = json.dumps(written.get("separator", ""))
    num_required = sum(key in required for key in properties)
    rest = [f" ({separator} {item})?" for item in items]
    if num_required:
        return f" {separator} ".join(items[:num_required]) + "".join(rest[num_required:])
    return f"({' | '.join(item + ''.join(rest[at + 1 :]) for at, item in enumerate(items))})?" if items else ""
