"""Applies mutants to the source, one at a time, and says which of them the tests catch.

    python tests/mutants.py              all of them, in a few minutes
    python tests/mutants.py shared cut   those whose description holds one of these words

A mutant is a place in src/forerun where one thing is done wrongly, and the tests of which at least one must then fail.
Its text is looked for in all modules, and must stand in exactly one of them: modules may move, and where a name in the
text is changed, the table below is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "forerun"
TIME_LIMIT = 300
"""Seconds for the tests of one mutant; those that take longer have not caught it."""
OUTCOMES = {0: "survived", 1: "killed"}
"""By pytest's exit status; of any other, the tests could not be run."""


@dataclass(frozen=True)
class Mutant:
    """One thing done wrongly.

    Attributes:
        law: what no longer holds.
        module: where the text stood when this was written, relative to src/forerun; for the reader alone.
        text: of the source, in one place only. wrong: what takes its place.
        tests: files or folders, relative to tests/, of which at least one test must fail.
    """

    law: str
    module: str
    text: str
    wrong: str
    tests: tuple[str, ...]


MUTANTS: list[Mutant] = [
]


def main() -> int:
    """0 if the tests catch all mutants that were asked for, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose description or module holds one of these")
    words = parser.parse_args().words
    mutants = [each for each in MUTANTS if not words or any(word in f"{each.module} {each.law}" for word in words)]
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    if not tests:
        print("No mutant is described so.")
        return 1
    with tempfile.TemporaryDirectory(prefix="forerun-mutants-") as folder:
        source = copy_of_source(Path(folder, "plain"))
        status, output = run(source, tests)
        if status:
            print(f"{output}\nThese tests must pass before anything is done wrongly.")
            return 1
        num_killed = sum(is_killed(mutant, Path(folder, str(place))) for place, mutant in enumerate(mutants))
    print(f"{num_killed} of {len(mutants)} mutants are killed.")
    return int(num_killed < len(mutants))


def is_killed(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails where the mutant is applied to a copy of the source. Says what came of it."""
    places = [path for path in PACKAGE.rglob("*.py") if mutant.text in path.read_text()]
    count = sum(path.read_text().count(mutant.text) for path in places)
    started, about = time.perf_counter(), ""
    if count != 1:
        outcome, about = "not applied", f"its text stands in {count} places:\n{mutant.text}"
    else:
        source = copy_of_source(folder)
        module = source / "forerun" / places[0].relative_to(PACKAGE)
        module.write_text(module.read_text().replace(mutant.text, mutant.wrong))
        status, output = run(source, mutant.tests)
        outcome = OUTCOMES.get(status, "broken")
        failed = [line for line in output.splitlines() if line.startswith("FAILED")]
        about = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else output if outcome == "broken" else ""
        shutil.rmtree(folder)
    print(f"{outcome:11} {time.perf_counter() - started:5.1f} s  {mutant.module}: {mutant.law}", flush=True)
    if about:
        print(f"{'':21}{about}", flush=True)
    return outcome == "killed"


def copy_of_source(folder: Path) -> Path:
    """A folder that holds a copy of the package, and can be put on the path of imports."""
    shutil.copytree(PACKAGE, folder / "forerun")  # with what was compiled of it: the times of files are kept
    return folder


def run(source: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status and the output of pytest, which stops at the first failure. source: as of `copy_of_source`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return -1, f"took more than {TIME_LIMIT} seconds"
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
