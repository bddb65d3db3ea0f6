"""Importing forerun does not import what only loading a model needs."""

import subprocess
import sys


def test_transformers_comes_with_the_first_model() -> None:
    code = "import sys; from forerun import LLM; from forerun.models import load_model; "
    code += "print([name for name in sys.modules if name.startswith('transformers')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wheel_is_compiled_where_torch_is_not() -> None:
    """The hook of `make wheel` runs in an environment that has the build's own needs alone."""
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import forerun.kernels.cpu.compiler; "
    code += "import forerun.kernels.cpu.compiler, forerun.kernels.cpu.platform_tag"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
