"""The exceptions of Transformers, tokenizers and safetensors as forerun's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.errors import ForerunError, ModelLoadError, NotEnoughMemoryError
from forerun.utils.machine import available_memory

REMEDY = "Download or save the model anew."
"""What to do about files that are damaged or not those of one model."""
_LENGTH = 300


@contextmanager
def as_load_errors(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelLoadError, "what: reason. remedy", for whatever the block raises.

    What these libraries raise on a damaged or hostile file is of any type, panics of their Rust parts included, which
    are no `Exception`. forerun's errors and what interrupts a program pass as they are; a lack of memory is not the
    file's fault (`as_memory_errors`).
    """
    try:
        with as_memory_errors(what):
            yield
    except ForerunError:
        raise
    except BaseException as failure:
        if not isinstance(failure, Exception) and not is_panic(failure):
            raise
        raise ModelLoadError(f"{what}: {reason(failure)}. {remedy}") from failure


@contextmanager
def as_memory_errors(what: str) -> Iterator[None]:
    """Raise NotEnoughMemoryError, "what: reason. remedy", where the system refuses memory in the block; others pass."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as failure:
        if not is_out_of_memory(failure):
            raise
        raise NotEnoughMemoryError(
            f"{what}: the system gives no more memory ({reason(failure)}). Raise the limit (ulimit -v), take weights "
            "of fewer bits (quantize='int4', --quantize int4), or end other programs.",
            0,
            available_memory() or 0,
        ) from failure


def is_out_of_memory(failure: BaseException | None) -> bool:
    """Return whether the system refused memory. A limit of the address space (ulimit -v) makes malloc, mmap and torch's
    allocator fail, each in its own way."""
    is_of_torch = isinstance(failure, RuntimeError) and "can't allocate memory" in str(failure)
    return isinstance(failure, MemoryError) or is_of_torch or getattr(failure, "errno", None) == errno.ENOMEM


def is_panic(failure: BaseException) -> bool:
    """Return whether a part in Rust panicked. The class has no place from which it could be imported."""
    return type(failure).__name__ == "PanicException"


def reason(failure: BaseException) -> str:
    """Return the exception's text in one line, with its type where the text alone says little."""
    is_of_hub = type(failure).__name__ == "LocalEntryNotFoundError"  # whose text has many lines
    text = "the hub cannot be reached" if is_of_hub else " ".join(str(failure).split()).rstrip(".")
    if len(text) > _LENGTH:
        text = text[:_LENGTH] + " ..."
    plain = isinstance(failure, (OSError, ValueError, RuntimeError, ImportError)) and not isinstance(
        failure, RecursionError
    )
    return text if plain and text else f"{type(failure).__name__} {text}".strip()
