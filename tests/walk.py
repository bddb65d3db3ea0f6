"""Count what of forerun runs for one token of `LLM.generate`, and for a GGUF file that is loaded.

Run it as `PYTHONPATH=src:tests python tests/walk.py [--list | --json]`; `--list` prints the functions of the first in
order of first entry. A walk is the distinct functions that Python enters in all threads (`sys.setprofile`), and the
files they stand in; generator expressions, comprehensions, lambdas and modules are left to what holds them.

- generate: the second call on an `LLM` of the bundled model: greedy, one token, drafter suffix.
- modules: those of forerun in `sys.modules` behind the first two calls, the package itself included.
- gguf: the second `load_model` of a tiny mixture of experts (qwen3moe) in blocks of Q8_0, behind these calls in the
  same process.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import forerun
from forerun import LLM, SamplingParams

_ROOT = str(Path(forerun.__file__).parent)
_PROMPT = "A sequence is a prompt and what follows it. A sequence is"


def entered(work: Callable[[], object]) -> dict[CodeType, int]:
    """Do some work, and return the functions that it enters with their calls, in order of first entry."""
    calls: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT) and not code.co_name.startswith("<"):
            calls[code] = calls.get(code, 0) + 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def generate() -> dict[CodeType, int]:
    """Return the functions that one token enters."""
    llm = LLM("bundled", drafter="suffix")
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate(_PROMPT, params)
    return entered(lambda: llm.generate(_PROMPT, params))


def gguf() -> dict[CodeType, int]:
    """Return the functions that loading a file enters."""
    import gguf_models
    from forerun.models import load_model
    from gguf_files import write_gguf

    with TemporaryDirectory() as folder:
        path = Path(folder) / "it.gguf"
        write_gguf(path, gguf_models.tiny("qwen3_moe"), "Q8_0")
        load_model(path)  # its self-test may be stored
        return entered(lambda: load_model(path))


def files(calls: dict[CodeType, int]) -> int:
    """Return the number of files that functions stand in."""
    return len({code.co_filename for code in calls})


def main() -> None:
    """Print the figures, or the functions that one token enters."""
    calls = generate()
    if "--list" in sys.argv:
        for code, count in calls.items():
            place = f"{code.co_filename[len(_ROOT) + 1 :]}:{code.co_firstlineno}"
            print(f"{count:5} {place:45} {code.co_qualname}")
        return
    modules = sum(name == "forerun" or name.startswith("forerun.") for name in sys.modules)
    loading = gguf()
    figures = {
        "functions entered by generate": len(calls),
        "files entered by generate": files(calls),
        "modules loaded by generate": modules,
        "functions entered by loading a GGUF file": len(loading),
        "files entered by loading a GGUF file": files(loading),
    }
    lines = [f"{count:>7,}  {name}" for name, count in figures.items()]
    print(json.dumps(figures) if "--json" in sys.argv else "\n".join(lines))


if __name__ == "__main__":
    main()
