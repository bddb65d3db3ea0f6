"""How many examples the fuzzers try: few by default, FORERUN_FUZZ of them where that is set."""

import os

from hypothesis import HealthCheck, Phase, settings


def examples(few: int) -> settings:
    """Settings of a fuzzer.

    The same examples in every run, and no search for a smaller one that fails; unless FORERUN_FUZZ asks for a number:
    then others each time, and what reproduces a failure is printed.
    """
    wanted = os.environ.get("FORERUN_FUZZ")
    return settings(
        max_examples=int(wanted) if wanted else few,
        derandomize=not wanted,
        deadline=None,
        phases=tuple(Phase) if wanted else (Phase.explicit, Phase.generate),
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
