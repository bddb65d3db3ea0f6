"""Count the functions and files of forerun that one `LLM.generate` of one token enters.

Run it as `PYTHONPATH=src python tests/walk.py [--list]`. The second call on an `LLM` is measured: greedy, one token,
drafter suffix. Generator expressions, comprehensions and lambdas are left to the function that holds them.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import forerun
from forerun import LLM, SamplingParams

_ROOT = str(Path(forerun.__file__).parent)
_PROMPT = "A sequence is a prompt and what follows it. A sequence is"


def main() -> None:
    """Print distinct functions, distinct files and calls, and with --list the functions in order of first entry."""
    llm = LLM("bundled", drafter="suffix")
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate(_PROMPT, params)
    calls: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT) and not code.co_name.startswith("<"):
            calls[code] = calls.get(code, 0) + 1

    threading.setprofile(note)
    sys.setprofile(note)
    llm.generate(_PROMPT, params)
    sys.setprofile(None)
    threading.setprofile(None)
    files = {code.co_filename for code in calls}
    print(f"{len(calls)} functions in {len(files)} files, {sum(calls.values())} calls")
    if "--list" in sys.argv:
        for code, count in calls.items():
            place = f"{code.co_filename[len(_ROOT) + 1 :]}:{code.co_firstlineno}"
            print(f"{count:5} {place:45} {code.co_qualname}")


if __name__ == "__main__":
    main()
