"""Option fields of dataclasses: each has its help, range and flag, for checks, documentation and command line.

@documented
@dataclass(frozen=True, slots=True)
class Options:
    max_tokens: int = option(128, "Tokens generated at most.", low=1)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache, reduce, wraps
from numbers import Integral, Real
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forerun.errors import ConfigError
from forerun.utils.habits import translated

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_KEY = "option"
_UNIONS = (Union, UnionType)
_WORDS: Mapping[object, str] = {bool: "True or False", str: "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """The metadata of an option beside its type and default.

    Attributes:
        help: what the field does, in sentences.
        low, high: the smallest and the largest number allowed.
        above: `low` itself is not allowed.
        remedy: what to do about a number out of range.
        flags: the flag's names where they are not made from the field's.
        metavar: what stands for the value in help, where the type's name does not tell.
        default_text: the default in words, where the value does not tell.
        choices: the texts allowed; none for all.
    """

    help: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    remedy: str = ""
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    default_text: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """Return the range in words; empty if there is none."""
        if self.low == -math.inf and self.high == math.inf:
            return ""
        if self.above:
            return f"above {self.low:g}" + ("" if self.high == math.inf else f" and at most {self.high:g}")
        if self.high == math.inf:
            return f"{self.low:g} or more"
        return f"{self.low:g}..{self.high if isinstance(self.high, int) else format(self.high, 'g')}"


def option(
    default: T,
    help: str,  # noqa: A002
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
    remedy: str = "",
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    default_text: str | None = None,
    choices: tuple[str, ...] = (),
) -> T:
    """Make a dataclass field with this default and an `Option` of the other arguments."""
    metadata = {_KEY: Option(help, low, high, above, remedy, flags, metavar, default_text, choices)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]  # T is dict here
    return field(default=default, metadata=metadata)


def option_like(options: type[DataclassInstance], name: str, default: T, *, default_text: str) -> T:
    """Make a field like that of another dataclass, with another default."""
    said = replace(described(options)[name].option, default_text=default_text)
    return field(default=default, metadata={_KEY: said})


@dataclass(frozen=True, slots=True)
class Described:
    """A field made by `option`, with its type resolved.

    Attributes:
        kind: its type without None. number: the type of number that it holds, if it holds one.
        default: makes its default.
    """

    name: str
    kind: object
    number: type[int] | type[float] | None
    option: Option
    default: Callable[[], object]

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that may replace a number, such as "auto"."""
        return tuple(word for kind in get_args(self.kind) if get_origin(kind) is Literal for word in get_args(kind))

    @property
    def expected(self) -> str:
        """Return what the value must be, in words."""
        if self.kind in _WORDS:
            return f"one of {', '.join(self.option.choices)}" if self.option.choices else _WORDS[self.kind]
        limits = self.option.range
        before = " " if limits else ""
        if ".." in limits:
            before = " in "
        elif limits and not self.option.above:
            before = " of "
        noun = "a whole number" if self.number is int else "a number"
        return " or ".join([noun + before + limits, *map(repr, self.words)])

    def accepts(self, value: object) -> bool:
        """Return whether a value has the field's type and range; True for types other than numbers, text and bool."""
        if self.kind in _WORDS:
            allowed = value in self.option.choices or not self.option.choices
            return allowed and isinstance(value, bool if self.kind is bool else str)
        if self.number is None or (isinstance(value, str) and value in self.words):
            return True
        if isinstance(value, bool) or not isinstance(value, Integral if self.number is int else Real):
            return False
        number = int(value) if isinstance(value, Integral) else float(value)
        lowest = self.option.low < number if self.option.above else self.option.low <= number
        return lowest and number <= self.option.high and abs(number) != math.inf


@cache
def described(options: type[DataclassInstance]) -> Mapping[str, Described]:
    """Return the fields of a dataclass that `option` made, by name and in their order."""
    hints = get_type_hints(options)
    found = {}
    for each in fields(options):
        if _KEY in each.metadata:
            kind = _without_none(hints[each.name])
            number = _number_in((kind, *get_args(kind)) if get_origin(kind) in _UNIONS else (kind,))
            found[each.name] = Described(each.name, kind, number, each.metadata[_KEY], _default_of(each))
    return found


def check_options(options: DataclassInstance, error: type[ConfigError]) -> None:
    """Replace None by the default and numbers of other libraries by Python's, and check the ranges of numbers.

    Raises:
        error: naming field, value and range.
    """
    for each in described(type(options)).values():
        value = getattr(options, each.name)
        if value is None:
            value = each.default()
        elif not each.accepts(value):
            raise error(f"{each.name} is {value!r}, but must be {each.expected}. {each.option.remedy}".rstrip())
        elif not isinstance(value, bool) and isinstance(value, Real):
            value = int(value) if isinstance(value, Integral) else float(value)
        object.__setattr__(options, each.name, value)


@dataclass(frozen=True, slots=True)
class Checked:
    """Options that are checked when they are made. Raises ConfigError, see `check_options`."""

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


def hinted(error: type[ConfigError]) -> Callable[[type[T]], type[T]]:
    """Have a dataclass of options refuse unknown ones with what forerun calls them, and take those that change nothing.

    error: what it then raises.
    """

    def decorate(options: type[T]) -> type[T]:
        made: Any = options.__init__

        @wraps(made)
        def init(self: T, *values: object, **given: object) -> None:
            names = described(options)  # type: ignore[arg-type]  # of dataclasses only
            if not given.keys() <= names.keys():
                given = translated(given, names, error, options.__name__)
            made(self, *values, **given)

        setattr(options, made.__name__, init)
        return options

    return decorate


def documented(options: type[T]) -> type[T]:
    """Add the fields' help to the docstring, under "Attributes:"."""
    lines = []
    for each in described(options).values():  # type: ignore[arg-type]  # of dataclasses only
        limits = f" ({each.option.range})" if each.option.range else ""
        lines.append(f"        {each.name}: {each.option.help}{limits}")
    options.__doc__ = f"{(options.__doc__ or '').rstrip()}\n\n    Attributes:\n" + "\n".join(lines) + "\n    "
    return options


def _number_in(kinds: tuple[object, ...]) -> type[int] | type[float] | None:
    if int in kinds:
        return int
    return float if float in kinds else None


def _without_none(hint: object) -> object:
    kinds = get_args(hint)
    return reduce(or_, (kind for kind in kinds if kind is not NoneType)) if NoneType in kinds else hint


def _default_of(each: Field[object]) -> Callable[[], object]:
    return each.default_factory if each.default_factory is not MISSING else lambda: each.default
