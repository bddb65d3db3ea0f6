"""What bits depend on besides the code: the kernels' instruction set, and torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

from forerun.kernels.cpu import native

BITS = "bits "
"""Lines that begin so are of one kind of processor, which the text before " = " says; others do not know them."""


_read: ContextVar[frozenset[str] | None] = ContextVar("read", default=None)
"""What stands before " = " in the lines that the text is compared with; None: it is compared with none."""


@contextmanager
def compared_with(text: str) -> Iterator[None]:
    """Leave out the bits that this text does not know, which take time to compute."""
    token = _read.set(frozenset(line.partition(" = ")[0] for line in text.splitlines()))
    try:
        yield
    finally:
        _read.reset(token)


def is_read(key: str) -> bool:
    """Whether a line of bits is compared. key: what stands before " = " in it."""
    read = _read.get()
    return read is None or key in read


@cache
def processor() -> str:
    """Return what the results of torch's libraries depend on: the processor's model."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        found = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
        return "processor " + ".".join(
            found.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping")
        )
    return "processor unknown"


def torch_key() -> str:
    """Return what torch's own results depend on."""
    return f"torch {torch.__version__.partition('+')[0]} {torch.backends.cpu.get_cpu_capability()}"


def there() -> list[str]:
    """Return the instruction sets that this processor has, of the native kernels."""
    library = native()
    assert library is not None
    return library.supported[::-1]


def common() -> str:
    """Return the instruction set of which tokens are: avx2, whose bits those of most processors are."""
    return "avx2" if "avx2" in there() else "portable"


@contextmanager
def computing_with(instructions: str) -> Iterator[None]:
    library = native()
    assert library is not None
    before = library.instructions
    assert library.use_instructions(instructions), f"{library.path} was not compiled for {instructions}"
    try:
        yield
    finally:
        library.use_instructions(before)
