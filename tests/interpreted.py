"""Triton's interpreter, made fit for tests: set before triton is imported, in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"


def quicken() -> None:
    """Leave out what costs the interpreter most: checks of integer overflow at every operation, and the exchange of the
    language's functions at every call of a device function, which the kernel that calls has done already."""
    from dataclasses import replace

    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched: set[str] = set()

    def call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
