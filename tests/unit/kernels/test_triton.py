"""The tests of the Triton kernels run in its interpreter, in a process of their own; the kernels compile for an H100.

Both need the package triton alone. Without it they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.slow,
]


def run(arguments: list[str], interpreted: bool) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900, cwd=TESTS.parent
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", sorted(path.name for path in (TESTS / "triton_kernels").glob("test_*.py")))
def test_in_the_interpreter(name: str) -> None:
    run(["-m", "pytest", f"tests/triton_kernels/{name}", "-q", "-p", "no:xdist", "-m", "not gpu"], interpreted=True)


def test_each_kernel_is_compiled_for_hopper_without_spills() -> None:
    run(["tests/compiled_for_hopper.py"], interpreted=False)
