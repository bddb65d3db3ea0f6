"""Load the native C++ kernels once per process, and choose between them and the PyTorch references."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from forerun.config import KERNELS, KERNELS_VARIABLE, NATIVE, REFERENCE, TRITON, environment_choice
from forerun.errors import ConfigError, NativeUnavailableError

if TYPE_CHECKING:
    import torch

    from forerun.kernels.cpu.library import Library

LOST = (
    "The kernels in PyTorch run instead: the same promises, but slower steps, and quantized weights gain no speed and "
    "take more memory than bfloat16."
)

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: Library | NativeUnavailableError | None = None
_warned = False
_only_references: ContextVar[bool] = ContextVar("only_references", default=False)


def native() -> Library | None:
    """Return the native library, or None where the PyTorch references run. One warning says why the library is
    unavailable.

    Raises:
        ConfigError: FORERUN_KERNELS is native, and it cannot be had; or that variable or FORERUN_INSTRUCTIONS has a
            value that it cannot have.
    """
    global _warned
    mode = environment_choice(KERNELS_VARIABLE, KERNELS)
    if mode in (REFERENCE, TRITON) or _only_references.get():
        return None
    found = load_library()
    if not isinstance(found, NativeUnavailableError):
        return found
    if mode == NATIVE:
        raise ConfigError(f"{KERNELS_VARIABLE} is {NATIVE}, but there are no native kernels. {found}")
    with _lock:
        if not _warned:
            _warned = True
            _log.warning("There are no native kernels. %s %s %s", found.reason, LOST, found.remedy)
    return None


@contextmanager
def references() -> Iterator[None]:
    """Load models with the PyTorch references inside the context, whatever FORERUN_KERNELS says."""
    token = _only_references.set(True)
    try:
        yield
    finally:
        _only_references.reset(token)


def only_references() -> bool:
    """Return whether the caller runs inside `references`."""
    return _only_references.get()


def is_triton_selected() -> bool:
    """Return whether models are to be computed by the Triton kernels.

    Raises:
        ConfigError: FORERUN_KERNELS has a value that it cannot have.
    """
    return environment_choice(KERNELS_VARIABLE, KERNELS) == TRITON and not only_references()


def native_for(device: torch.device) -> Library | None:
    """Return the native library if it computes models on this device, which must be the CPU; else None."""
    return native() if device.type == "cpu" else None


def kernels_in_use() -> str | None:
    """Return the kernels that the models of this process use, as reports name them: "native avx512", "triton",
    "reference"; None if no model has requested native kernels."""
    selected = os.environ.get(KERNELS_VARIABLE)
    if selected in (REFERENCE, TRITON):
        return selected
    if _loaded is None:
        return None
    return REFERENCE if isinstance(_loaded, NativeUnavailableError) else f"{NATIVE} {_loaded.instructions}"


def loaded() -> Library | None:
    """Return the native library if this process has loaded it."""
    return None if isinstance(_loaded, NativeUnavailableError) else _loaded


@contextmanager
def paced_threads() -> Iterator[None]:
    """Run torch's operations inside, or in a function that this decorates, by as many threads as calls of the native
    kernels take now: fewer beside a program that has a processor, since torch would wait for it at every operation.

    Only for operations that give the same bits by any number of threads. Sums of floats over a row do not.
    """
    library = loaded()
    if library is None:
        yield
        return
    with library.paced_threads():
        yield


def load_library() -> Library | NativeUnavailableError:
    """Return the library, or the error that makes it unavailable, whatever FORERUN_KERNELS says. Tried once per
    process.

    Raises:
        ConfigError: FORERUN_INSTRUCTIONS has a value that it cannot have.
    """
    global _loaded
    from forerun.kernels.cpu.compiler import library_path
    from forerun.kernels.cpu.library import Library

    with _lock:
        if _loaded is None:
            try:
                _loaded = Library.open(library_path())
            except NativeUnavailableError as failure:
                _loaded = failure.with_traceback(None)
        return _loaded
