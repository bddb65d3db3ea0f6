"""The file of the native library: prebuilt in a wheel, or compiled once by this machine's compiler and kept.

It is kept in the folder kernels/KEY of `home()`, where KEY stands for all that decides what it holds and where it runs:
sources, flags, architecture and features of the processor, C library, compiler. Beside it lies a file with its
checksum, compared before the library is loaded. The folder appears as a whole or not at all. Nothing is compiled for
the processor alone: the instruction set is chosen at run time.

Where the compiler fails, the file KEY.failed.json keeps its reason, and later processes repeat that in place of
compiling. A compiler that is missing, or a disk that is full, is looked at each time.
"""

from __future__ import annotations

import logging
import os
import platform
from contextlib import suppress
from functools import partial
from pathlib import Path

from forerun import processor
from forerun.errors import CompilationError, NativeUnavailableError
from forerun.files.json_file import Fields
from forerun.files.write import digest, file_digest, leftovers, locked, remove, whole_folder, write_json
from forerun.home import HOME_VARIABLE, KERNELS_FOLDER, home
from forerun.kernels.native.compiler import INSTALL, Compiler, find_compiler

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
PREBUILT = HERE / "prebuilt"
"""In a wheel for one platform: the folder of the library that was compiled for it."""
LIBRARY = "libforerun.so"
FACTS = "build.json"
"""Beside the library: what it was compiled from and by, and its checksum."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
"""Without -march and -ffast-math: the file serves any processor of its architecture, with the same bits."""
TIME_LIMIT = 300.0
"""Seconds that compiling may take: half a minute on a free core, several times that on a busy machine."""
_WAIT = TIME_LIMIT + 30
"""Seconds to wait for another process that compiles the same."""
_ELSEWHERE = f"The variable {HOME_VARIABLE} names another folder."

_log = logging.getLogger(__name__)
_unwritable = partial(NativeUnavailableError, remedy=_ELSEWHERE)


def library_path(
    sources: Path = SOURCES, prebuilt: Path = PREBUILT, limit: float = TIME_LIMIT, wait: float = _WAIT
) -> Path:
    """The library, compiled now if need be; its checksum was compared.

    Args:
        sources: the folder of the C++ files: *.cpp are compiled, headers may lie in folders below.
        prebuilt: the folder of a library that came with them; one of other sources is passed over.
        limit: seconds that compiling may take.
        wait: seconds to wait for another process that is at it.

    Raises:
        NativeUnavailableError: there is none, and none can be compiled or kept.
    """
    recipe = _recipe(sources)
    if _is_sound(prebuilt, recipe):
        return prebuilt / LIBRARY
    if os.name != "posix":
        raise NativeUnavailableError(
            f"The native kernels do not run on {platform.system()}.", "Linux and macOS run them."
        )
    base = home()
    if base is None:
        raise NativeUnavailableError("There is no home folder to keep them in.", f"Set the variable {HOME_VARIABLE}.")
    here = digest("\n".join((recipe, *processor.features(), *platform.libc_ver())).encode())
    kept, compiler = base / KERNELS_FOLDER, find_compiler()
    if compiler is None:
        for folder in sorted(kept.glob(f"{here[:16]}-*")):  # compiled when there was a compiler
            if _is_sound(folder, recipe):
                return folder / LIBRARY
        raise NativeUnavailableError("There is no C++ compiler.", INSTALL)
    folder = kept / f"{here[:16]}-{digest(repr(compiler).encode())[:16]}"
    if not _is_sound(folder, recipe):
        _refuse_what_failed(folder)
        remedy = "A program compiles there: wait, or end it."
        with locked(folder, _unwritable, wait=wait, remedy=remedy):
            if not _is_sound(folder, recipe):  # else another process has just done it
                _refuse_what_failed(folder)  # or has just failed
                for left in leftovers(folder):  # by processes that were killed: nobody else has the lock
                    remove(left)
                _log.warning("Compiling the kernels, once: this can take a minute.")
                try:
                    compile_into(folder, compiler, sources, limit)
                except CompilationError as failure:
                    raise _kept_failure(folder, failure) from None
    return folder / LIBRARY


def compile_into(
    folder: Path, compiler: Compiler, sources: Path = SOURCES, limit: float = TIME_LIMIT, extra: tuple[str, ...] = ()
) -> None:
    """Compile by one call, and let library and facts take the place of `folder` together.

    Args:
        extra: further arguments of the compiler.

    Raises:
        CompilationError: it fails, or takes longer than `limit` seconds.
        NativeUnavailableError: the folder cannot be written.
    """
    recipe, files = _recipe(sources), [str(path) for path in sorted(sources.glob("*.cpp"))]
    with whole_folder(folder, _unwritable) as new:
        library = new / LIBRARY
        compiler.call([*FLAGS, *extra, "-o", str(library), *files], limit)
        try:
            with library.open("rb") as file:
                checksum = file_digest(file)
        except FileNotFoundError:
            raise CompilationError(f"{compiler.command[0]} has written no library.", INSTALL) from None
        facts = {"recipe": recipe, "library": checksum, "compiler": compiler.version.partition("\n")[0]}
        write_json(new / FACTS, facts, error=_unwritable)


def _failure_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.failed.json")


def _kept_failure(folder: Path, failure: CompilationError) -> CompilationError:
    """The failure for those that come later too, as far as it can be written."""
    file = _failure_file(folder)
    with suppress(NativeUnavailableError):
        write_json(file, {"reason": failure.reason, "remedy": failure.remedy}, error=_unwritable)
    return _with_retry(failure.reason, failure.remedy, file)


def _refuse_what_failed(folder: Path) -> None:
    """Raises CompilationError where these sources and this compiler have failed before."""
    file = _failure_file(folder)
    try:
        facts = Fields.read(file, ValueError)
        reason, remedy = facts.string("reason"), facts.string("remedy")
    except ValueError:
        return
    raise _with_retry(reason, remedy, file)


def _with_retry(reason: str, remedy: str, file: Path) -> CompilationError:
    return CompilationError(reason, f"{remedy} This compiler is not tried again until {file} is removed.")


def _recipe(sources: Path) -> str:
    """A hash of what the library is made from: sources, flags, architecture. Raises NativeUnavailableError."""
    try:
        files = [path for path in sorted(sources.rglob("*")) if path.suffix in (".cpp", ".h")]
        parts = [f"{path.relative_to(sources).as_posix()}\n{digest(path.read_bytes())}\n".encode() for path in files]
    except OSError as failure:
        reason = f"The sources of the kernels cannot be read: {sources}: {failure.strerror}."
        raise NativeUnavailableError(reason, "Install forerun anew.") from None
    if not any(path.suffix == ".cpp" for path in files):
        raise NativeUnavailableError(f"The sources of the kernels are not in {sources}.", "Install forerun anew.")
    return digest(*parts, "\n".join((*FLAGS, platform.system(), platform.machine())).encode())


def _is_sound(folder: Path, recipe: str) -> bool:
    """Whether the folder has a library of this recipe, as it was written."""
    try:
        facts = Fields.read(folder / FACTS, ValueError)
        with (folder / LIBRARY).open("rb") as file:
            return facts.string("recipe") == recipe and facts.string("library") == file_digest(file)
    except (OSError, ValueError):
        return False
