"""The processor of this machine: its name, and what its instruction set holds."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model Name", "cpu model")
_FEATURES = ("flags", "Features")
"""On x86 and on ARM."""


def model() -> str:
    """Its name, as the system gives it."""
    facts = _facts()
    names = [facts[key] for key in _NAMES if key in facts]
    return names[0] if names else platform.processor() or "unknown processor"


def features() -> tuple[str, ...]:
    """What its instruction set holds, in Linux's words ("avx2", "asimd"), sorted; empty where the system tells none."""
    facts = _facts()
    return tuple(sorted({word for key in _FEATURES for word in facts.get(key, "").split()}))


@cache
def _facts() -> dict[str, str]:
    """What Linux tells of the first processor; empty elsewhere."""
    facts = {}
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, separator, value = line.partition(":")
                if not separator:
                    break
                facts[key.strip()] = value.strip()
    except OSError:
        pass
    return facts
