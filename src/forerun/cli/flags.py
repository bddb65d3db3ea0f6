"""Flags made from the fields of options (`forerun.fields`): name, type, help, range and default come from the field.

    @app.command()
    @with_flags
    def generate(*, params: Annotated[SamplingParams, Flags(leave_out=("tenant",), panel="Sampling")]) -> None: ...

`forerun generate --help` then shows a flag for every field of SamplingParams that `option` made except `tenant`, and
`params` is built from them. `Flags("seed", text_tokens="tokens")` takes the named fields alone: `--seed` sets `seed`,
`--text-tokens` sets `tokens`. Two parameters that name the same flag both receive its value; a parameter with a fixed
start value has it in `Flags(base=...)`. The environment variable of a repeated flag of text holds one text, or a JSON
list of texts; that of other repeated flags holds values with blanks between them.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from forerun.config import AUTO, NumDraftTokens
from forerun.fields import Described, described

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Flags:
    """Which fields of a parameter's options become flags.

    Args:
        fields: their names; none at all takes every field that `option` made.
        base: what the flags change; None takes the class's defaults.
        leave_out: fields that get no flag.
        panel: the heading under which help shows them.
        renamed: flag (with underscores) -> field.
    """

    def __init__(
        self,
        *fields: str,
        base: DataclassInstance | None = None,
        leave_out: Sequence[str] = (),
        panel: str | None = None,
        **renamed: str,
    ) -> None:
        self.base, self.leave_out, self.panel = base, leave_out, panel
        self._names: dict[str, str] = dict.fromkeys(fields, "") | renamed

    def bound(self, options: type[DataclassInstance]) -> tuple[DataclassInstance, list[Flag]]:
        """For the parameter of this class: what the flags change, and the flags."""
        fields = described(options)
        names = self._names or {name: "" for name in fields if name not in self.leave_out}
        base = self.base or options()
        return base, [Flag.of(key, fields[field or key], base, self.panel) for key, field in names.items()]


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of one type are written.

    Attributes:
        metavar: what stands for the value in help.
        read: text -> value; raises ValueError.
        noun: what the text should be.
        many: the flag may be repeated; makes the field's value of all that were read.
    """

    metavar: str
    read: Callable[[str], object]
    noun: str = ""
    many: Callable[[Iterable[Any]], object] | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the field that it sets.

    Attributes:
        names: as they are written, the longest first.
        default: the value without the flag.
    """

    names: tuple[str, ...]
    field: Described
    default: object
    panel: str | None

    @classmethod
    def of(cls, key: str, field: Described, base: object, panel: str | None) -> Flag:
        """The flag `key` for this field of `base`."""
        names = (field.option.flags if key == field.name else ()) or ("--" + key.replace("_", "-"),)
        return cls(names, field, getattr(base, field.name), panel)

    @property
    def key(self) -> str:
        """The name in environment variables and configuration files."""
        return self.names[0].removeprefix("--").replace("-", "_")

    @property
    def kind(self) -> Kind | None:
        """How its values are written; None for a switch."""
        return None if self.field.kind is bool else _KINDS[self.field.kind]

    def parameter(self) -> inspect.Parameter:
        """What typer makes the flag from."""
        kind, option, default = self.kind, self.field.option, self.default
        about = f"{option.help} ({option.range})" if option.range else option.help
        about += " Repeatable." if kind is not None and kind.many else ""
        made = partial(typer.Option, *self.names, help=about, rich_help_panel=self.panel)
        if kind is None:
            annotation: Any = Annotated[bool, made()]
        else:
            shown: bool | str = kind.many is None
            if default is None:
                shown = option.default_text or False
            made = partial(made, metavar=option.metavar or kind.metavar, show_default=shown, parser=self.parse)
            annotation = Annotated[list[str] if kind.many else Any, made()]
        start = default if kind is None or not kind.many else None
        return inspect.Parameter(self.key, inspect.Parameter.KEYWORD_ONLY, default=start, annotation=annotation)

    def parse(self, value: object) -> object:
        """One value, as text or as a configuration file has it; typer.BadParameter if it is wrong or out of range."""
        kind, field = self.kind, self.field
        assert kind is not None
        try:
            read = kind.read(str(value))
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not {kind.noun or field.expected}.") from None
        if not field.accepts(read):
            raise typer.BadParameter(f"{value!r} is not {field.expected}. {field.option.remedy}".rstrip())
        return read

    def value(self, given: Any, ctx: typer.Context) -> object:
        """The field's value, from what typer has read."""
        kind = self.kind
        if kind is None or kind.many is None:
            return self.default if given is None else given
        source = ctx.get_parameter_source(self.key)
        if kind.read is str and source is not None and source.name == "ENVIRONMENT":
            # typer has cut it at blanks, which a text may hold
            given = _texts(os.environ[f"{ctx.auto_envvar_prefix}_{self.key.upper()}"])
        return kind.many(given) if given else self.default


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with flags in place of each parameter annotated `Annotated[Options, Flags(...)]`."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[DataclassInstance, list[Flag]]] = {}
    parameters = {"ctx": inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)}
    for name, parameter in signature.parameters.items():
        options, *more = get_args(parameter.annotation) or (None,)
        if more and isinstance(more[0], Flags):
            groups[name] = more[0].bound(options)
            for flag in groups[name][1]:
                made = parameters.setdefault(flag.key, flag.parameter())
                assert made.default == flag.parameter().default, f"{name} has another default for {flag.key}"
        else:
            parameters[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    def run(**values: Any) -> None:
        ctx = values["ctx"]
        given = {name: values[name] for name in signature.parameters if name not in groups}
        for name, (base, flags) in groups.items():
            given[name] = replace(base, **{flag.field.name: flag.value(values[flag.key], ctx) for flag in flags})
        command(**given)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def given(ctx: typer.Context, *keys: str) -> list[str]:
    """Those of these flags that a command line, an environment variable or a configuration file sets."""
    sources = {key: ctx.get_parameter_source(key) for key in keys}
    return [f"--{key.replace('_', '-')}" for key, source in sources.items() if source and source.name != "DEFAULT"]


def _texts(variable: str) -> list[str]:
    """The texts in the environment variable of a repeated flag: a JSON list of them, else the whole is one."""
    try:
        texts = json.loads(variable)
    except ValueError:
        texts = None
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else [variable]


def _num_draft_tokens(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    return int(token_id), float(value)


_KINDS: Mapping[object, Kind] = {
    int: Kind("INT", int),
    float: Kind("FLOAT", float),
    str: Kind("TEXT", str),
    Path: Kind("PATH", Path),
    str | Sequence[int]: Kind("TEXT", str),
    Sequence[str]: Kind("TEXT", str, many=tuple),
    Sequence[int]: Kind("INT", int, "a whole number", tuple),
    Mapping[int, float]: Kind("ID=VALUE", _bias, "ID=VALUE, such as 17=-2.5", dict),
    NumDraftTokens: Kind("K|auto", _num_draft_tokens),
}
"""Types of fields for which there are flags, without None."""
