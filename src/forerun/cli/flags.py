"""Make flags from the fields of options (`forerun.utils.fields`), with their name, type, help, range and default.

    @app.command()
    @with_flags
    def generate(*, params: Annotated[SamplingParams, Flags(leave_out=("tenant",), panel="Sampling")]) -> None: ...

`forerun generate --help` then shows a flag for every field of SamplingParams that `option` made except `tenant`, and
`params` is built from them. `Flags("seed", text_tokens="tokens")` takes the named fields alone: `--seed` sets `seed`,
`--text-tokens` sets `tokens`. Two parameters that name the same flag both receive its value; `Flags(base=...)` changes
the defaults. With `Flags(typed=("seed",))` the other fields are hidden: they have no flag, but are keys of the
command's table in a configuration file. So is each option that the command itself declares `hidden`.
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
from forerun.utils.habits import hint

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
        self.base = base
        self.leave_out = leave_out
        self.typed = typed
        self.panel = panel
        self._names: dict[str, str] = dict.fromkeys(fields, "") | renamed

    def bound(self, options: type[DataclassInstance]) -> tuple[DataclassInstance, list[Flag]]:
        """Return the options that the flags change, and the flags, for a parameter of this class."""
        fields = described(options)
        names = self._names or {name: "" for name in fields if name not in self.leave_out}
        base = self.base or options()
        flags = [Flag.of(key, fields[field or key], base, self.panel) for key, field in names.items()]
        typed = fields if self.typed is None else self.typed
        return base, [replace(flag, hidden=flag.field.name not in typed) for flag in flags]


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The text form of one type of values.

    Attributes:
        metavar: placeholder of the value in help.
        read: text -> value; raises ValueError.
        noun: description of valid text.
        many: makes the field's value from all values of a repeatable flag; None: the flag is not repeatable.
    """

    metavar: str
    read: Callable[[str], object]
    noun: str = ""
    many: Callable[[Iterable[Any]], object] | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the field that it sets.

    Attributes:
        names: spellings, the longest first.
        default: the value without the flag.
        hidden: it is only a key of the configuration file.
    """

    names: tuple[str, ...]
    field: Described
    default: object
    panel: str | None
    hidden: bool = False

    @classmethod
    def of(cls, key: str, field: Described, base: object, panel: str | None) -> Flag:
        """Make the flag `key` for this field of `base`."""
        names = (field.option.flags if key == field.name else ()) or ("--" + key.replace("_", "-"),)
        return cls(names, field, getattr(base, field.name), panel)

    @property
    def key(self) -> str:
        """Return the name in configuration files."""
        return self.names[0].removeprefix("--").replace("-", "_")

    @property
    def kind(self) -> ValueKind | None:
        """Return the text form of its values; None for a switch."""
        return None if self.field.kind is bool else _KINDS[self.field.kind]

    def parameter(self) -> inspect.Parameter:
        """Return the parameter from which typer makes the flag."""
        kind = self.kind
        option = self.field.option
        default = self.default
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
        """Parse one value of a command line or configuration file. Raises typer.BadParameter."""
        kind = self.kind
        field = self.field
        assert kind is not None
        try:
            read = kind.read(str(value))
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not {kind.noun or field.expected}.") from None
        if not field.accepts(read):
            raise typer.BadParameter(f"{value!r} is not {field.expected}. {field.option.remedy}".rstrip())
        return read

    def value(self, given: Any) -> object:
        """Return the field's value for the value that typer has read."""
        if self.kind is None or self.kind.many is None:
            return self.default if given is None else given
        return self.kind.many(given) if given else self.default


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter annotated `Annotated[Options, Flags(...)]` of a command by its flags.

    The help lists the keys without a flag, too. The command raises ConfigError if such a key is given as a flag.
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

    run.__name__ = command.__name__
    run.__doc__ = _help(command, parameters)
    run.__module__ = command.__module__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def given(ctx: typer.Context, *keys: str) -> list[str]:
    """Return those of these flags that the command line or the configuration file sets."""
    sources = {key: ctx.get_parameter_source(key) for key in keys}
    return [f"--{key.replace('_', '-')}" for key, source in sources.items() if source and source.name != "DEFAULT"]


def unknown_flag(error: Any) -> Any:
    """Return a usage error; that of an unknown flag says what forerun calls it.

    error: Click's UsageError.
    """
    if error.ctx is None or not hasattr(error, "possibilities"):
        return error
    params = [each for each in error.ctx.command.params if each.param_type_name == "option"]
    keys = {flag.lstrip("-").replace("-", "_"): each for each in params for flag in each.opts if flag.startswith("--")}

    def spelled(option: str) -> str:
        key, _, value = option.partition("=")
        if keys[key].hidden:
            return f"the key {key} of a --config file"
        return f"--{key.replace('_', '-')} {value}".replace("'", "").rstrip()

    name = error.option_name.lstrip("-").replace("-", "_")
    error.message = f"No such option: {error.option_name}. {hint(name, keys, spelled)}".rstrip()
    error.possibilities = []
    return error


def _help(command: Callable[..., None], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the command's docstring with the keys that only a configuration file may set."""
    hidden = [
        name
        for name, each in parameters.items()
        if any(getattr(meta, "hidden", False) for meta in getattr(each.annotation, "__metadata__", ()))
    ]
    about = inspect.cleandoc(command.__doc__ or "")
    return f"{about}\n\nIn a --config file alone (forerun options): {', '.join(hidden)}." if hidden else about


def _refuse_hidden(ctx: typer.Context) -> None:
    """Raise ConfigError if a key without a flag was given on the command line."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if getattr(parameter, "hidden", False) and source is not None and source.name == "COMMANDLINE":
            *_, table = ctx.command_path.partition(" ")
            raise ConfigError(
                f"{parameter.opts[0]} is not a flag. Set the key {parameter.name} in the table "
                f"[{table.replace(' ', '.')}] of a TOML file, and pass the file with --config."
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
    Sequence[str | Sequence[int]]: ValueKind("TEXT", str, many=tuple),
    Mapping[int, float]: ValueKind("ID=VALUE", _bias, "ID=VALUE, such as 17=-2.5", dict),
    NumDraftTokens: ValueKind("K|auto", _num_draft_tokens),
}
"""Types of fields for which there are flags, without None."""
