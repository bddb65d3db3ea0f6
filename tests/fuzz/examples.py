"""How many examples the fuzzers try: few by default, FORERUN_FUZZ of them where that is set."""

import os

from hypothesis import HealthCheck, settings


def examples(few: int) -> settings:
    """Settings of a fuzzer. The same examples in every run, unless FORERUN_FUZZ asks for a number: then others."""
    wanted = os.environ.get("FORERUN_FUZZ")
    return settings(
        max_examples=int(wanted) if wanted else few,
        derandomize=not wanted,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
