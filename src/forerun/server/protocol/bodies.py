"""Models of what bodies share: sampling, drafting and grammars.

A null field counts as left out. Every other field is applied, or has no effect and is in `without_effect.py`, or is
refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json
from typing_extensions import TypedDict

from forerun.config import MAX_NUM_DRAFT_TOKENS, MAX_TOP_LOGPROBS, NO_DRAFTER, Grammar, SamplingParams
from forerun.drafters.parse_text import split_spec
from forerun.errors import GrammarError, RequestBodyError, SamplingError
from forerun.server.protocol.without_effect import WITHOUT_EFFECT
from forerun.utils.fields import described
from forerun.utils.habits import hint
from forerun.utils.json_file import described_value

B = TypeVar("B", bound="Body")

_LARGE = 1 << 17
"""Bytes of a body whose validation would take longer than other streams may wait."""
_MOST_BRACKETS, _MOST_VALUES = 1 << 18, 100_000
"""Of a large body."""
_MOST_STOPS = 256
_LARGEST_BIAS = 100
"""As OpenAI's."""
SAME_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n", "priority"),
    *("include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words"),
)
"""Fields of SamplingParams that have the same name in a body: OpenAI's, and those that its client sends as
`extra_body`. All others are given in another form, or are the server's."""

# The first bad entry of a list ends its validation, which would else make an error of each.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Messages = Annotated[Objects, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class BodyPart(BaseModel):
    """An object of a body, or a body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def others(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the fields that are none of the model's, or of objects in it, by their path, and their values."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                yield path + name, value
        for name in type(self).model_fields:
            if isinstance(part := getattr(self, name), BodyPart):
                yield from part.others(f"{path}{name}.")


class Body(BodyPart):
    """A body."""

    model: str | None = None

    def check_others(self) -> None:
        """Raise RequestBodyError for a field that is none of the model's, and that would have an effect."""
        for path, value in self.others():
            shown = ascii(path[:60])[1:-1]
            param = shown.partition(".")[0]
            if path not in WITHOUT_EFFECT:
                known = sorted({*type(self).model_fields, *WITHOUT_EFFECT})
                remedy = None if "." in path else hint(path, known, repr, sentences=False)
                raise RequestBodyError(
                    f"{shown} is not supported: {described_value(value)} would be ignored. {remedy or 'Leave it out.'}",
                    param,
                )
            reason, values, _ = WITHOUT_EFFECT[path]
            if values is not None and not any(value == each and type(value) is type(each) for each in values):
                raise RequestBodyError(
                    f"{path} is not supported, other than {' or '.join(map(repr, values))}: {_shown(value)} would be "
                    f"ignored, since {reason}. Leave it out.",
                    param,
                )

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the fields that are taken without effect, and are told."""
        return tuple(path for path, _ in self.others() if WITHOUT_EFFECT[path].is_told)


def validated(model: type[B], content: object) -> B:
    """Return a body as its model.

    Args:
        content: JSON, or the value that a JSON text holds.

    Raises:
        RequestBodyError: naming the field that is missing, malformed, or unsupported.
    """
    try:
        if isinstance(content, bytes) and len(content) <= _LARGE:
            body = model.model_validate_json(content)
        else:
            body = model.model_validate(_read_large(content) if isinstance(content, bytes) else content)
    except ValidationError as error:
        raise _refusal(error, model) from None
    body.check_others()
    return body


_WORDS = {"string": "a string", "bool": "true or false", "list": "a list", "int": "a whole number", "float": "a number"}
_WORDS |= {"dict": "an object", "model": "an object", "missing": "given"}
_ANY_LENGTH = 2**62
_NAME = re.compile(r"[\w.:-]{1,60}", re.ASCII)


def _refusal(error: ValidationError, model: type[Body]) -> RequestBodyError:
    """Return an error that names the field at fault, the type of its value, what it must be, and the remedy.

    model: the descriptions of its fields with alternatives are noun phrases.
    """
    first = error.errors(include_url=False)[0]
    place = first["loc"]
    kind = first["type"]
    message = first["msg"]
    value = first["input"]
    if isinstance(raised := first.get("ctx", {}).get("error"), RequestBodyError):
        return raised
    if kind == "json_invalid":
        return RequestBodyError(f"The request's body: it is not JSON: {message.partition(': ')[2]}. Send JSON.")
    if kind == "too_long":
        most = first["ctx"]["max_length"]
        return RequestBodyError(
            f"{place[0]} has more entries than the {most} that it may have. Leave some out.", str(place[0])
        )
    if kind == "too_short" and len(place) == 1:
        return RequestBodyError(f"{place[0]} is empty. Give at least one entry.", str(place[0]))
    if not place:
        return RequestBodyError("The request's body is not a JSON object. Give one, with the fields of the request.")
    name = str(place[0])
    if name in (*SAME_NAMES, "max_tokens"):
        alone: dict[str, Any] = {"max_tokens": _ANY_LENGTH, name: [value] if isinstance(place[-1], int) else value}
        try:
            SamplingParams(**alone)
        except SamplingError as refused:
            return RequestBodyError(str(refused), name)
    expected = model.model_fields[name].description
    path = name if expected else ascii(".".join(map(str, place))[:100])[1:-1]
    if expected and (entry := next((each for each in place if isinstance(each, int)), None)) is not None:
        return RequestBodyError(f"{name} is wrong at entry {entry}: it must be {expected}. Correct it.", name)
    expected = expected or _WORDS.get(kind.removesuffix("_type"), message.removeprefix("Input should be "))
    found = _shown(value) if kind == "literal_error" else described_value(value)
    found = "missing; it" if kind == "missing" else f"{found}, but"
    return RequestBodyError(f"{path} is {found} must be {expected}. Correct it, or leave it out.", name)


def _shown(value: object) -> str:
    """Describe the value of a field of few values: itself, if it may be a name."""
    return repr(value) if isinstance(value, str) and _NAME.fullmatch(value) else described_value(value)


def _read_large(content: bytes) -> object:
    """Return the value of a large body. Raises RequestBodyError if it is no JSON, or has too many values.

    Parsing and validation hold the interpreter, each for as long as a value is large: what no model takes is refused
    between them.
    """
    keys = content.count(b'":') - content.count(b'\\":')  # without those of texts that hold JSON
    if 2 * keys + content.count(b"[") + content.count(b"{") > _MOST_BRACKETS:
        raise RequestBodyError(
            f"The request's body has more than {_MOST_BRACKETS} opening brackets, or half as many keys. Send fewer "
            "lists and objects."
        )
    try:
        value = from_json(content)
    except ValueError as error:
        raise RequestBodyError(f"The request's body: it is not JSON: {error}. Send JSON.") from None
    for name, field in value.items() if isinstance(value, dict) else ():
        if _has_many_values(field):
            shown = ascii(name[:60])[1:-1]
            raise RequestBodyError(f"{shown} has more than {_MOST_VALUES} values. Send fewer.", shown)
    return value


def _has_many_values(value: object) -> bool:
    """Return whether there are more than _MOST_VALUES values in this one, of which a list of numbers is one."""
    pending = [value]
    count = 0
    while pending and count + len(pending) <= _MOST_VALUES:
        each = pending.pop()
        count += 1
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list) and {*map(type, each)} != {int}:
            pending += each
    return bool(pending)


def _sampling_fields() -> dict[str, Any]:
    """Return the sampling options with their types, ranges and help."""
    stops, ids = (Annotated[kind, Field(max_length=_MOST_STOPS)] for kind in (Strings, TokenIds))
    lists: dict[str, Any] = {
        "stop": str | stops,
        "stop_token_ids": ids,
        "allowed_token_ids": TokenIds,
        "bad_words": stops,
        "logit_bias": dict[str, Any],
    }
    fields = {}
    for name in SAME_NAMES:
        each = described(SamplingParams)[name]
        limits: dict[str, Any] = {"gt" if each.option.above else "ge": each.option.low, "le": each.option.high}
        given = {key: limit for key, limit in limits.items() if abs(limit) != math.inf}
        kind: Any = lists.get(name) or Annotated[each.kind, Field(**given)]
        fields[name] = (kind | None, Field(None, description=each.option.help))
    return fields


def _chosen_drafter(given: object) -> object:
    """Return a drafter's text as the object with the same meaning. Raises ValueError if it is malformed."""
    if isinstance(given, bool):
        return {} if given else {"drafter": NO_DRAFTER}
    if not isinstance(given, str):
        return given
    name, options = split_spec(given)
    return {"drafter": name} | {key: int(value) for key, value in options.items()}


class Drafting(BodyPart):
    """Which drafter drafts, and how many tokens at most."""

    drafter: str | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_NUM_DRAFT_TOKENS)] | None = None


class TextPart(TypedDict):
    """A part of a text: a dictionary, which takes a fifth of a model's time, since there may be many."""

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]


def content_text(content: str | list[Any]) -> str:
    """Return a text, or that of its parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Function(TypedDict):
    """A function that the model may call."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class PredictedOutput(BodyPart):
    """The expected output."""

    type: Literal["content"]
    content: str | TextParts


class Schema(BodyPart):
    """A JSON schema with a name. Every schema is held to strictly."""

    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Format(Schema):
    """The form of an answer; the schema is a part of its own, or as in Responses beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def chosen(self, name: str) -> tuple[str, Any] | None:
        """Return the kind of the grammar, and what makes it; None for text. Raises RequestBodyError.

        name: of its field.
        """
        definition = (self.json_schema or self).definition
        if self.type == "json_schema" and definition is None:
            raise RequestBodyError(f"{name} has no schema. Give one, or another type.", name)
        if self.type == "text":
            return None
        return ("json_object", True) if definition is None else ("json", definition)


class StructuredOutputs(BodyPart):
    """The form of an answer, as in vLLM: one of these."""

    definition: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None

    def chosen(self, name: str) -> tuple[str, Any] | None:
        """Return as `Format.chosen`. Raises RequestBodyError."""
        given = [(kind, value) for kind, value in self.model_dump(by_alias=True).items() if value is not None]
        if len(given) != 1:
            raise RequestBodyError(
                f"{name} must have one of json, json_object, regex, choice and grammar. Correct it, or leave it out.",
                param=name,
            )
        return None if given[0][1] is False else given[0]


_MAKERS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda _: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}


def grammar_of(fields: Mapping[str, Format | StructuredOutputs | tuple[str, Any] | None]) -> Grammar | None:
    """Return the grammar of an answer.

    Args:
        fields: field of the body -> its value; or the kind of the grammar, and what makes it.

    Raises:
        RequestBodyError: it is invalid, or there are several.
    """
    found = {
        name: each if each is None or isinstance(each, tuple) else each.chosen(name) for name, each in fields.items()
    }
    chosen = {name: each for name, each in found.items() if each is not None}
    if len(chosen) > 1:
        names = " and ".join(chosen)
        raise RequestBodyError(f"{names} both constrain the answer. Give one of them.", [*chosen][-1])
    for name, (kind, value) in chosen.items():
        try:
            return replace(_MAKERS[kind](value), field=name)
        except GrammarError as error:
            raise RequestBodyError(f"{name}: {error}", name) from None
    return None


Sampling: Any = create_model("Sampling", __base__=Body, **_sampling_fields())


class GenerationBody(Sampling):  # type: ignore[misc]  # its fields are those of SamplingParams
    """What every request for an answer may have."""

    stream: bool | None = None
    speculative: (
        Annotated[Drafting, BeforeValidator(_chosen_drafter, json_schema_input_type=bool | str | Drafting)] | None
    ) = Field(
        None,
        description="true, false, the name of a drafter that the server has loaded, "
        '"SPECULATIVE:num_draft_tokens=4", or an object of "drafter" and "num_draft_tokens"',
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="a text of 1 to 1024 characters: the cache is shared with requests of the same one alone"
    )
    prediction: PredictedOutput | None = Field(
        None,
        description='{"type": "content", "content": ...} with a text, or a list of {"type": "text", "text": ...}',
    )

    def params(self, own: Mapping[str, Any], **others: Any) -> SamplingParams:
        """Return the options of sampling.

        Args:
            own: those that the model recommends, for what the body leaves out.
            others: fields of SamplingParams that a body gives in another form.

        Raises:
            RequestBodyError: an option is out of range, or contradicts another.
        """
        given = {name: value for name in SAME_NAMES if (value := getattr(self, name)) is not None}
        if self.speculative is not None:
            given |= self.speculative.model_dump(exclude_none=True)
        if self.prediction is not None:
            given["prediction"] = content_text(self.prediction.content)
        try:
            params = SamplingParams(**{**own, **given, "tenant": self.cache_salt, **others})
            if bias := next((bias for bias in params.logit_bias.values() if abs(bias) > _LARGEST_BIAS), None):
                raise SamplingError(f"logit_bias holds {bias:g}, but a bias is in -{_LARGEST_BIAS}..{_LARGEST_BIAS}.")
            return params
        except SamplingError as error:
            name = str(error).split(maxsplit=1)[0]  # messages begin with the field
            raise RequestBodyError(str(error), name if name in SAME_NAMES else None) from None
