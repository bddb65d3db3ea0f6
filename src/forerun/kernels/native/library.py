"""The native library as ctypes sees it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from forerun.config import INSTRUCTIONS, INSTRUCTIONS_VARIABLE, environment_choice
from forerun.errors import ConfigError, NativeUnavailableError

ABI = 1
"""FORERUN_ABI of csrc/forerun.h."""
_LEVELS = INSTRUCTIONS[::-1]
"""By the numbers that the library gives them."""
_REMEDY = "Remove it, so that it is made anew."


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """The functions in C++.

    Attributes:
        path: the file.
        best: the best instruction set that the processor has.
        instructions: the one that is used.
        functions: by their names in C.
    """

    path: Path
    best: str
    instructions: str
    functions: ctypes.CDLL

    @classmethod
    def open(cls, path: Path) -> Library:
        """Load the library, for the instruction set that FORERUN_INSTRUCTIONS names, else the best.

        Raises:
            NativeUnavailableError: it cannot be loaded, or has another interface.
            ConfigError: the processor lacks what FORERUN_INSTRUCTIONS names, or there is no such instruction set.
        """
        try:
            functions = ctypes.CDLL(str(path))
            abi, level = functions.forerun_abi(), functions.forerun_best_instructions()
        except (OSError, AttributeError) as failure:
            raise NativeUnavailableError(f"{path} cannot be loaded: {failure}.", _REMEDY) from None
        if abi != ABI:
            raise NativeUnavailableError(f"{path} has the interface {abi}, not {ABI}.", _REMEDY)
        best = _LEVELS[level]
        chosen = choose_instructions(best)
        functions.forerun_use_instructions(_LEVELS.index(chosen))
        return cls(path, best, chosen, functions)


def choose_instructions(best: str) -> str:
    """What FORERUN_INSTRUCTIONS names, else the best that the processor has.

    Raises:
        ConfigError: the processor lacks it, or there is no such instruction set.
    """
    chosen = environment_choice(INSTRUCTIONS_VARIABLE, INSTRUCTIONS) or best
    if INSTRUCTIONS.index(chosen) < INSTRUCTIONS.index(best):
        raise ConfigError(
            f"{INSTRUCTIONS_VARIABLE} is {chosen!r}, but this processor has {best} at best. Give that, or unset it."
        )
    return chosen
