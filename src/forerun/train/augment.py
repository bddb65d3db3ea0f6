"""Repeated and edited spans, so that a model learns to copy what it has read earlier in the document.

People edit code by copying: the same function again with a name changed, a line added, a line gone.
The standard library itself shows little of it, and a model that cannot copy serves editing badly.
"""

from __future__ import annotations

import builtins
import keyword
import random
import re
from collections.abc import Iterable, Sequence

_IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{2,}\b")
_DEFINED = re.compile(r"\b(?:def|class|for|as)\s+([A-Za-z_]\w{2,})|^[ \t]*([A-Za-z_]\w{2,})\s*=[^=]", re.MULTILINE)
_KEPT = frozenset({"self", "cls", "__init__", *keyword.kwlist, *dir(builtins)})
_MIN_LINES, _MAX_LINES = 6, 40
_LINES_PER_COPY = 80
"""In long files, up to one copy for so many lines."""
_RENAMED_AT_MOST = 0.5


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
    """`text` with some of its spans repeated, exactly or edited, at once or up to thirty lines further on.

    One to three spans, in long texts up to one in 80 lines. Texts shorter than two spans come back unchanged.
    """
    lines = text.split("\n")
    for _ in range(rng.randint(1, max(3, len(lines) // _LINES_PER_COPY))):
        if len(lines) < 2 * _MIN_LINES:
            break
        length = rng.randint(_MIN_LINES, min(_MAX_LINES, len(lines) // 2))
        start = rng.randrange(len(lines) - length)
        span = lines[start : start + length]
        at = min(len(lines), start + length + rng.randint(0, 30))
        lines[at:at] = ["", *edited(span, rng)]
    return "\n".join(lines)


def defined_names(text: str) -> list[str]:
    """The names that `text` itself defines or binds, sorted, without `self`, builtins and dunder names."""
    found = {name for pair in _DEFINED.findall(text) for name in pair if name}
    return sorted(name for name in found if name not in _KEPT and not name.startswith("__"))


def name_pool(texts: Iterable[str]) -> list[str]:
    """Every name defined in some text, sorted: what names are renamed to."""
    return sorted({name for text in texts for name in defined_names(text)})


def renamed_throughout(text: str, rng: random.Random, pool: Sequence[str]) -> str:
    """`text` with up to half of the names it defines replaced, wherever they stand, by names from `pool`.

    A name can then not be learnt by heart; it has to be read from the text before it.
    """
    names = defined_names(text)
    chosen = rng.sample(names, round(rng.random() * _RENAMED_AT_MOST * len(names)))
    replacement = {name: rng.choice(pool) for name in chosen}
    return _IDENTIFIER.sub(lambda match: replacement.get(match[0], match[0]), text) if replacement else text
