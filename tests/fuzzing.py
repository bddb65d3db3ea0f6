"""How much the fuzzers try: few examples, always the same, unless FORERUN_FUZZ says how many (then at random)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

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
