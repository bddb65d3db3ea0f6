"""How much the fuzzers try: few examples, always the same, unless FORERUN_FUZZ says how many (then at random)."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

EXAMPLES = int(os.environ.get("FORERUN_FUZZ", "0"))


def examples(small: int) -> settings:
    """A decorator for a property: `small` examples, or FORERUN_FUZZ of them. A failure prints how to repeat it."""
    return settings(
        max_examples=EXAMPLES or small,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def fails(fuzzer: Any, count: int, strategies: dict[str, SearchStrategy[Any]], **rest: Any) -> bool:
    """Whether a property fails within so many examples, in whatever way. The example is not made small: that takes many
    times longer than finding it, and nobody reads it.

    Args:
        fuzzer: made by `given`.
        strategies: what it is given.
        rest: its other arguments.
    """
    found = settings(examples(count), phases=[Phase.generate])(given(**strategies)(fuzzer.hypothesis.inner_test))
    try:
        found(**rest)
    except BaseException:
        return True
    return False
