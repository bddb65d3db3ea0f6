"""Tokenizers of the library `tokenizers`, which may end its process for want of memory.

One that did not come with the package is used in another process before it is used in this one: once for its content,
since what passed is remembered in forerun's folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from forerun.errors import ModelLoadError
from forerun.utils.files import digest
from forerun.utils.home import TOKENIZERS_FOLDER, home
from forerun.utils.processes import watched_memory

_TRIAL = "1"
"""Changes whenever a trial tests other things."""
_PROCESS = Path(__file__).with_name("tokenizer_trial_process.py")
_SECONDS = 120.0
_MEMORY, _MEMORY_PER_BYTE = 1 << 30, 16
"""Bytes of the process, and bytes more for each of the file; it takes about ten."""
_ALONE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # each thread would reserve memory


def check_tokenizer(content: bytes, place: str, remedy: str) -> None:
    """Use the tokenizer of a tokenizer.json in another process, unless one of this content passed before.

    Raises:
        ModelLoadError: it ends its process, takes too much time or memory, or cannot be used. Names `place`, its file.
    """
    base = home()
    key = digest(content, f"{_TRIAL} {version('tokenizers')}".encode())
    passed = None if base is None else base / TOKENIZERS_FOLDER / key
    if passed is not None and passed.exists():
        return
    if found := _trial(content):
        raise ModelLoadError(f"{place}: no tokenizer can be made of it: {found}. {remedy}")
    if passed is not None:
        with suppress(OSError):  # then it is tried again
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def _trial(content: bytes) -> str | None:
    """Return what is wrong with a tokenizer.json; None if it can be used."""
    bound = _MEMORY + _MEMORY_PER_BYTE * len(content)
    command = [sys.executable, "-P", str(_PROCESS), str(bound)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=os.environ | _ALONE)
    except OSError as failure:
        return f"the process that tries it could not be started: {failure.strerror or failure}"
    with process, watched_memory(process, bound) as exceeded:
        try:
            told, _ = process.communicate(content, timeout=_SECONDS)
        except BaseException as failure:
            process.kill()
            if not isinstance(failure, subprocess.TimeoutExpired):
                raise
            return f"it was not ready after {_SECONDS:g} seconds"
    if exceeded.is_set():
        return f"it made the process that tried it take more than the {bound >> 20:,} MiB that were allowed"
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"it ended the process that tried it ({name}), for which {bound >> 20:,} MiB were allowed"
    failed = f"the process that tries it ended with {process.returncode}" if process.returncode else None
    return told.decode().rstrip(".") or failed
