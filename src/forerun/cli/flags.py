"""Make flags from the fields of options (`forerun.utils.fields`): name, type, help, range and default are the field's.

    @app.command()
    @with_flags
    def generate(*, params: Annotated[SamplingParams, Flags(leave_out=("tenant",), panel="Sampling")]) -> None: ...

`forerun generate --help` then shows a flag for every field of SamplingParams that `option` made except `tenant`, and
`params` is built from them. `Flags("seed", text_tokens="tokens")` takes the named fields alone: `--seed` sets `seed`,
`--text-tokens` sets `tokens`. Two parameters that name the same flag both receive its value; a parameter with a fixed
start value has it in `Flags(base=...)`. With `Flags(typed=("seed",))` the other fields are hidden: without a flag, but
keys of the command's table in a configuration file. So is each option that the command itself declares `hidden`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from forerun.config import AUTO, NumDraftTokens
from forerun.errors import ConfigError
from forerun.utils.fields import Described, described

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Flags:
    """Which fields of a parameter's options become flags.

    Args:
        fields: their names; none at all takes every field that `option` made.
        base: what the flags change; None takes the class's defaults.
        leave_out: fields that get neither flag nor key.
        typed: fields with a flag; the others are keys of the configuration file alone. None: all have one.
        panel: the heading under which help shows them.
        renamed: flag (with underscores) -> field.
    """

    def __init__(
        self,
        *fields: str,
        base: DataclassInstance | None = None,
        leave_out: Collection[str] = (),
        typed: Collection[str] | None = None,
        panel: str | None = None,
        **renamed: str,
    ) -> None:
        self.base, self.leave_out, self.typed, self.panel = base, leave_out, typed, panel
        self._names: dict[str, str] = dict.fromkeys(fields, "") | renamed

    def bound(self, options: type[DataclassInstance]) -> tuple[DataclassInstance, list[Flag]]:
        """For the parameter of this class: what the flags change, and the flags."""
        fields = described(options)
        names = self._names or {name: "" for name in fields if name not in self.leave_out}
        base = self.base or options()
        flags = [Flag.of(key, fields[field or key], base, self.panel) for key, field in names.items()]
        typed = fields if self.typed is None else self.typed
        return base, [replace(flag, hidden=flag.field.name not in typed) for flag in flags]


@dataclass(frozen=True, slots=True)
class ValueKind:
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
        hidden: it is a key of the configuration file alone.
    """

    names: tuple[str, ...]
    field: Described
    default: object
    panel: str | None
    hidden: bool = False

    @classmethod
    def of(cls, key: str, field: Described, base: object, panel: str | None) -> Flag:
        """The flag `key` for this field of `base`."""
        names = (field.option.flags if key == field.name else ()) or ("--" + key.replace("_", "-"),)
        return cls(names, field, getattr(base, field.name), panel)

    @property
    def key(self) -> str:
        """The name in configuration files."""
        return self.names[0].removeprefix("--").replace("-", "_")

    @property
    def kind(self) -> ValueKind | None:
        """How its values are written; None for a switch."""
        return None if self.field.kind is bool else _KINDS[self.field.kind]

    def parameter(self) -> inspect.Parameter:
        """What typer makes the flag from."""
        kind, option, default = self.kind, self.field.option, self.default
        about = f"{option.help} ({option.range})" if option.range else option.help
        about += " Repeatable." if kind is not None and kind.many else ""
        made = partial(typer.Option, *self.names, help=about, rich_help_panel=self.panel, hidden=self.hidden)
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

    def value(self, given: Any) -> object:
        """The field's value, from what typer has read."""
        kind = self.kind
        if kind is None or kind.many is None:
            return self.default if given is None else given
        return kind.many(given) if given else self.default


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with flags in place of each parameter annotated `Annotated[Options, Flags(...)]`.

    Its help tells the keys without a flag, too. One that is given like a flag raises ConfigError.
    """
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
        _refuse_hidden(values["ctx"])
        given = {name: values[name] for name in signature.parameters if name not in groups}
        for name, (base, flags) in groups.items():
            given[name] = replace(base, **{flag.field.name: flag.value(values[flag.key]) for flag in flags})
        command(**given)

    run.__name__, run.__doc__, run.__module__ = command.__name__, _help(command, parameters), command.__module__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def given(ctx: typer.Context, *keys: str) -> list[str]:
    """Those of these flags that a command line or a configuration file sets."""
    sources = {key: ctx.get_parameter_source(key) for key in keys}
    return [f"--{key.replace('_', '-')}" for key, source in sources.items() if source and source.name != "DEFAULT"]


def _help(command: Callable[..., None], parameters: Mapping[str, inspect.Parameter]) -> str:
    """The command's docstring, and the keys that only a configuration file may set."""
    hidden = [
        name
        for name, each in parameters.items()
        if any(getattr(said, "hidden", False) for said in getattr(each.annotation, "__metadata__", ()))
    ]
    about = inspect.cleandoc(command.__doc__ or "")
    return f"{about}\n\nIn a --config file alone (forerun options): {', '.join(hidden)}." if hidden else about


def _refuse_hidden(ctx: typer.Context) -> None:
    """Raise ConfigError where a key of the configuration file alone was given as a flag."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if getattr(parameter, "hidden", False) and source is not None and source.name == "COMMANDLINE":
            table = ".".join(ctx.command_path.split()[1:])
            raise ConfigError(
                f"{parameter.opts[0]} is no flag. Set the key {parameter.name} in the table [{table}] of a TOML file, "
                "and give that file with --config."
            )


def _num_draft_tokens(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    return int(token_id), float(value)


_KINDS: Mapping[object, ValueKind] = {
    int: ValueKind("INT", int),
    float: ValueKind("FLOAT", float),
    str: ValueKind("TEXT", str),
    Path: ValueKind("PATH", Path),
    str | Sequence[int]: ValueKind("TEXT", str),
    Sequence[str]: ValueKind("TEXT", str, many=tuple),
    Sequence[int]: ValueKind("INT", int, "a whole number", tuple),
    Mapping[int, float]: ValueKind("ID=VALUE", _bias, "ID=VALUE, such as 17=-2.5", dict),
    NumDraftTokens: ValueKind("K|auto", _num_draft_tokens),
}
"""Types of fields for which there are flags, without None."""
