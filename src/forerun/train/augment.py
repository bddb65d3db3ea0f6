"""Repeated and edited spans, so that a model learns to copy what it has read earlier in the document.

People edit code by copying: the same function again with a name changed, a line added, a line gone.
The standard library itself shows little of it, and a model that cannot copy serves editing badly.
"""

from __future__ import annotations

import keyword
import random
import re

_IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,}\b")
_MIN_LINES, _MAX_LINES = 6, 40


def renamed(lines: list[str], rng: random.Random) -> list[str]:
    """`lines` with one to three identifiers renamed throughout."""
    text = "\n".join(lines)
    names = sorted({n for n in _IDENTIFIER.findall(text) if not keyword.iskeyword(n)})
    for name in rng.sample(names, min(len(names), rng.randint(1, 3))):
        new = rng.choice(["new_", "other_", "my_", "old_", "_"]) + name if rng.random() < 0.5 else rng.choice(names)
        text = re.sub(rf"\b{name}\b", new, text)
    return text.split("\n")


def edited(lines: list[str], rng: random.Random) -> list[str]:
    """`lines` with renamed identifiers, or a line deleted, or one inserted, or unchanged (a third)."""
    kind = rng.random()
    if kind < 1 / 3:
        return list(lines)
    result = renamed(lines, rng) if kind < 2 / 3 else list(lines)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(result))
        if rng.random() < 0.5 and len(result) > 2:
            del result[at]
        else:
            result.insert(at, rng.choice(lines))
    return result


def with_copies(text: str, rng: random.Random) -> str:
    """`text` with one to three of its spans repeated, exactly or edited, some lines further on.

    Texts shorter than a span and a half come back unchanged.
    """
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        if len(lines) < 2 * _MIN_LINES:
            break
        length = rng.randint(_MIN_LINES, min(_MAX_LINES, len(lines) // 2))
        start = rng.randrange(len(lines) - length)
        span = lines[start : start + length]
        at = min(len(lines), start + length + rng.randint(0, 30))
        lines[at:at] = ["", *edited(span, rng)]
    return "\n".join(lines)
