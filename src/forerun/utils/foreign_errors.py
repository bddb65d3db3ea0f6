"""The exceptions of Transformers, tokenizers and safetensors as forerun's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forerun.errors import ForerunError, ModelLoadError

REMEDY = "Download or save the model anew."
"""What to do about files that are damaged or not those of one model."""
_LENGTH = 300


@contextmanager
def as_load_errors(what: str, remedy: str) -> Iterator[None]:
    """Raise ModelLoadError, "what: reason. remedy", for whatever the block raises.

    What these libraries raise on a damaged or hostile file is of any type, panics of their Rust parts included, which
    are no `Exception`. forerun's errors and what interrupts a program pass as they are.
    """
    try:
        yield
    except ForerunError:
        raise
    except BaseException as failure:
        if not isinstance(failure, Exception) and not is_panic(failure):
            raise
        raise ModelLoadError(f"{what}: {reason(failure)}. {remedy}") from failure


def is_panic(failure: BaseException) -> bool:
    """Return whether a part in Rust panicked. The class has no place from which it could be imported."""
    return type(failure).__name__ == "PanicException"


def reason(failure: BaseException) -> str:
    """Return the exception's text in one line, with its type where the text alone says little."""
    text = " ".join(str(failure).split()).rstrip(".")
    if len(text) > _LENGTH:
        text = text[:_LENGTH] + " ..."
    plain = isinstance(failure, (OSError, ValueError, RuntimeError, ImportError)) and not isinstance(
        failure, RecursionError
    )
    return text if plain and text else f"{type(failure).__name__} {text}".strip()
