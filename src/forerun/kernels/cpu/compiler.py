"""Find the C++ compiler, compile of the native library what this processor runs, once, or take that of a wheel."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from forerun.config import INSTRUCTIONS, INSTRUCTIONS_VARIABLE, environment_choice
from forerun.errors import CompilationError, ConfigError, NativeUnavailableError
from forerun.kernels.cpu.targets import Target, library_name, zig_commands
from forerun.utils import machine
from forerun.utils.files import digest, file_digest, leftovers, locked, new_files, remove, write_json
from forerun.utils.home import HOME_VARIABLE, KERNELS_FOLDER, home
from forerun.utils.json_file import Fields
from forerun.utils.processes import end_group
from forerun.utils.signals import cleaned_up, held

VARIABLE = "CXX"
"""Environment variable: the compiler, with optional arguments. If set, no other is tried."""
INSTALL = (
    "Install one: pip install 'forerun[compiler]'; or g++ or clang++ (on Debian and Ubuntu: apt install g++), or name "
    "a C++ compiler by the variable CXX."
)
_NAMES = ("c++", "g++", "clang++")
_VERSION_SECONDS = 20.0
_REASON_CHARACTERS = 300
_POLL = 0.02
"""Seconds after which running compilers are looked at again."""
_MAX_OUTPUT = 1 << 20
_DISK_FULL = (
    "Free disk space in the folder that FORERUN_HOME names and in that of temporary files, or set TMPDIR to another."
)
_LATER = "Try again when the machine has less to do, or name another compiler by the variable CXX."
_ANOTHER = f"Free memory if there was too little; else name another compiler by the variable CXX. {INSTALL}"


class TookTooLongError(CompilationError):
    """The compiler was ended by a time limit."""


def _subject(name: str) -> str:
    return f"The kernels for {name}" if name in INSTRUCTIONS else "They"


@dataclass(frozen=True, slots=True)
class Compiler:
    """An installed compiler.

    Attributes:
        command: starts it.
        version: the output of --version.
    """

    command: tuple[str, ...]
    version: str

    def outcomes(self, arguments: Mapping[str, Sequence[str]], limit: float) -> dict[str, CompilationError]:
        """Run the compiler with each of these arguments, on as many cores as there are, and return what failed.

        Args:
            arguments: by name.
            limit: seconds for all, after which those that run are killed with their child processes.

        Returns:
            By name, the errors of those that failed; `TookTooLongError` of those that the limit ended.

        Raises:
            NativeUnavailableError: one cannot be started, or the disk is full.
        """
        done = _run([[*self.command, *each] for each in arguments.values()], limit)
        found = dict[str, CompilationError]()
        for name, (code, output) in zip(arguments, done, strict=True):
            what = f"{_subject(name)} could not be compiled: {self.command[0]}"
            if code is None:
                took = f"{what} took longer than {round(limit, 1):g} seconds, and was ended."
                found[name] = TookTooLongError(took, _LATER)
            elif code:
                reason = f"{what} {_reason(code, output)}."
                if "No space left" in output:
                    raise NativeUnavailableError(reason, _DISK_FULL)
                found[name] = CompilationError(reason, _ANOTHER)
        return found


def find_compiler() -> Compiler | None:
    """Return the compiler that CXX names, else the first of c++, g++, clang++ and Zig's that is installed, or None.

    Raises:
        NativeUnavailableError: CXX names one that is not there, or --version fails.
    """
    chosen = os.environ.get(VARIABLE, "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [*([name] for name in _NAMES), *zig_commands()]
    except ValueError as failure:  # a quotation mark that is not closed
        raise _no_such(chosen, str(failure)) from None
    for program, *arguments in commands:
        if (path := shutil.which(program)) is not None:
            command = (path, *arguments)
            [(code, output)] = _run([[*command, "--version"]], _VERSION_SECONDS)
            if code is None:
                took = f"took longer than {_VERSION_SECONDS:g} seconds, and was ended"
                raise NativeUnavailableError(f"{path} --version {took}.", INSTALL)
            if code:
                raise NativeUnavailableError(f"{path} --version {_reason(code, output)}.", INSTALL)
            return Compiler(command, output.strip())
    if chosen:
        raise _no_such(chosen, "there is no such program")
    return None


def _no_such(chosen: str, reason: str) -> NativeUnavailableError:
    return NativeUnavailableError(f"{VARIABLE} is {chosen!r}: {reason}.", f"Correct it, or unset it. {INSTALL}")


def _run(commands: Sequence[Sequence[str]], limit: float) -> list[tuple[int | None, str]]:
    """Run commands, side by side, and return the exit code and the output of each; no code of those that `limit` ended,
    or that did not begin until then. Raises NativeUnavailableError if one cannot start."""
    try:
        # Its temporary files lie in here, and go with it even where it is killed.
        with cleaned_up(), TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True) as scratch:
            logs = [Path(scratch) / f"output{index}" for index in range(len(commands))]
            for path in logs:  # no pipe: whoever is left of its group could hold that open
                path.touch()
            codes = _exit_codes([partial(_start, *each, scratch) for each in zip(commands, logs, strict=True)], limit)
            outputs = list[str]()
            for path in logs:
                with path.open("rb") as log_file:
                    outputs.append(log_file.read(_MAX_OUTPUT).decode("utf-8", "replace"))
            return list(zip(codes, outputs, strict=True))
    except OSError as failure:
        reason = f"Temporary files of {commands[0][0]} cannot be written: {failure.strerror or failure}."
        raise NativeUnavailableError(reason, _DISK_FULL) from None


def _start(command: Sequence[str], log_file: Path, scratch: str) -> subprocess.Popen[bytes]:
    with log_file.open("wb") as file:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": scratch, "LC_ALL": "C"},
                start_new_session=True,  # a group of its own, to be ended with all that it starts
            )
        except OSError as failure:
            reason = f"{command[0]} cannot be run: {failure.strerror or failure}."
            raise NativeUnavailableError(reason, INSTALL) from None


def _exit_codes(starts: Sequence[Callable[[], subprocess.Popen[bytes]]], limit: float) -> list[int | None]:
    """Start processes, as many at once as there are cores, and return the exit code of each; None of those that had not
    ended in time. Whatever else ends this, Ctrl-C and SIGTERM included, kills their process groups."""
    waiting = deque(enumerate(starts))
    running = dict[int, subprocess.Popen[bytes]]()
    codes: list[int | None] = [None] * len(starts)
    end = time.monotonic() + limit
    try:
        while waiting or running:
            while waiting and len(running) < machine.cores():
                index, start = waiting.popleft()
                with held():
                    running[index] = start()
            for index, process in [*running.items()]:
                if (code := process.poll()) is not None:
                    codes[index] = code
                    del running[index]
            if running and time.monotonic() > end:
                break
            time.sleep(_POLL)
        return codes
    finally:
        for process in running.values():
            end_group(process)
            process.wait()


def _reason(code: int, output: str) -> str:
    """Return a clause with the cause of a failure: the first output line that mentions an error, else the last line."""
    what = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "No space left" in line or "error" in line.lower()] or lines[-1:]
    return f"{what}: {telling[0][:_REASON_CHARACTERS].rstrip('.')}" if telling else what


# The native library: prebuilt in a wheel, or compiled by this machine's compiler and kept.
#
# It is kept in the folder kernels/KEY of `home()`, where KEY stands for everything that decides its contents and where
# it runs: sources, flags, architecture and features of the processor, C library, compiler. Beside the library lie the
# objects that it is linked from, and a file with checksums, compared before any of them is used. A file is replaced as
# a whole, and a process that has loaded the former one keeps it. Nothing is compiled for one processor alone.
#
# What is compiled first is a small library that says which instruction sets the processor has. Then follow the kernels
# of the set that is to run, and later those of others that are wanted, each once. A wheel has all.
#
# Where the compiler fails, the file KEY.NAME.failed.json keeps its reason, and later processes repeat that in place of
# compiling NAME.cpp. One that took too long is tried again by the next process, once, with more time. A compiler that
# is missing, or a disk that is full, is looked at each time.

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
PREBUILT = HERE / "prebuilt"
"""In a wheel for one platform: the folder of the library that was compiled for it."""
LIBRARY = library_name(platform.system())
PROCESSOR = "libprocessor.so"
"""Beside the library: says which instruction sets the processor has."""
FACTS = "build.json"
"""Beside the library: what it was compiled from and by, for which instruction sets, and checksums."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
"""Without -march and -ffast-math: the file serves any processor of its architecture, with the same bits. Functions name
the instructions that they are compiled for, on x86 and on ARM64."""
TIME_LIMIT = 300.0
"""Seconds that compiling and linking may take at first: a quarter of a minute of one core, and many times that on a
busy machine."""
_TRIES = 2
"""How often they may take too long, each time with twice the time: a compiler that hangs is not to hold up every start
for ever."""
_WAIT = (1 + len(INSTRUCTIONS)) * TIME_LIMIT * 2 ** (_TRIES - 1) + 30
"""Seconds to wait for another process that compiles the same: it may try what names the processor's sets, and each."""
_OTHER_FOLDER = f"The variable {HOME_VARIABLE} names another folder."
REMOVE = "Remove it, so that it is made anew."
_ELSEWHERE = f"Let the variable {HOME_VARIABLE} name a folder where programs may be executed."

_log = logging.getLogger(__name__)
_unwritable = partial(NativeUnavailableError, remedy=_OTHER_FOLDER)


def library_path(
    sources: Path = SOURCES,
    prebuilt: Path = PREBUILT,
    limit: float = TIME_LIMIT,
    wait: float = _WAIT,
    *,
    every: bool = False,
) -> Path:
    """Return the path of a library for the instruction set that `choose_instructions` prefers, compiling what is
    missing, after comparing its checksum. Where the compiler fails with that set, it is one for the next best.

    Args:
        sources: the folder of the C++ files: *.cpp are compiled, headers may lie in folders below.
        prebuilt: the folder of a library that came with them; one of other sources is passed over.
        limit: seconds that compiling and linking may take at first.
        wait: seconds to wait for another process that is compiling.
        every: the library is for every instruction set that the processor has, or this raises.

    Raises:
        NativeUnavailableError: there is none, and none can be compiled or kept.
        ConfigError: as `choose_instructions`.
    """
    recipe = _recipe(sources, platform.system(), platform.machine())
    if _Kept(prebuilt, recipe).is_sound(LIBRARY):
        return prebuilt / LIBRARY
    if os.name != "posix":
        raise NativeUnavailableError(
            f"The native kernels do not run on {platform.system()}.", "Linux and macOS run them."
        )
    base = home()
    if base is None:
        raise NativeUnavailableError("There is no home folder to keep them in.", f"Set the variable {HOME_VARIABLE}.")
    here = digest("\n".join((recipe, *machine.features(), *platform.libc_ver())).encode())
    folders = base / KERNELS_FOLDER
    compiler = find_compiler()
    if compiler is None:
        for folder in sorted(folders.glob(f"{here[:16]}-*")):  # compiled when there was a compiler
            if (kept := _Kept(folder, recipe)).chosen() is not None:
                return folder / LIBRARY
        raise NativeUnavailableError("There is no C++ compiler.", INSTALL)
    kept = _Kept(folders / f"{here[:16]}-{digest(repr(compiler).encode())[:16]}", recipe)
    if not kept.is_complete(every):
        try:
            _Build(kept, compiler, sources, limit).complete(every, wait)
        except NativeUnavailableError as failure:
            instead = kept.chosen()
            if instead is None or every:
                raise
            _log.warning("%s The kernels for %s run instead. %s", failure.reason, instead, failure.remedy)
    return kept.folder / LIBRARY


def choose_instructions(present: Sequence[str]) -> Sequence[str]:
    """Return the instruction set that FORERUN_INSTRUCTIONS names, alone, else all in order of preference.

    Args:
        present: those that the processor has, the best first.

    Raises:
        ConfigError: the processor lacks it, or there is no such instruction set.
    """
    chosen = environment_choice(INSTRUCTIONS_VARIABLE, INSTRUCTIONS)
    if not chosen:
        return present
    if chosen not in present:  # a processor with AVX-512 may lack AVX-VNNI
        has = ", ".join(present)
        raise ConfigError(
            f"{INSTRUCTIONS_VARIABLE} is {chosen!r}, but this processor has only {has}. Give one of these, or unset it."
        )
    return [chosen]


def compile_into(
    folder: Path,
    compiler: Compiler,
    sources: Path = SOURCES,
    limit: float = TIME_LIMIT,
    extra: tuple[str, ...] = (),
    target: Target | None = None,
) -> None:
    """Compile a library for all instruction sets, each file on a core of its own, with its build facts.

    Args:
        extra: further arguments of the compiler.
        target: the platform that is to find the library, in place of this one; `extra` tells the compiler of it.

    Raises:
        CompilationError: it fails, or takes longer than `limit` seconds.
        NativeUnavailableError: the folder cannot be written.
    """
    system, architecture = (target.system, target.machine) if target else (platform.system(), platform.machine())
    library = library_name(system)
    build = _Build(_Kept(folder, _recipe(sources, system, architecture)), compiler, sources, limit, extra, library)
    for failure in build.link(library, build.core, build.sets, limit).values():
        raise failure


def build_of(library: Path) -> str:
    """Return what decides the bits that this library computes with one instruction set, whichever others were compiled
    into it: sources, compiler, and the folder's name, for the rest. Raises ConfigError if it says nothing of them."""
    facts = Fields.read(library.parent / FACTS, ConfigError)
    return "\n".join((facts.string("recipe"), facts.string("compiler"), library.parent.name))


def kept_failure(library: Path, instructions: str) -> CompilationError | None:
    """Return why the kernels for an instruction set were not compiled into this library, if their compiler failed."""
    return _Note.read(library.parent, instructions).failure


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Raise NativeUnavailableError if a shared library cannot be loaded in this block, or lacks a function."""
    try:
        yield
    except (OSError, AttributeError) as failure:
        if _is_noexec(path):
            reason = f"{path} cannot be loaded: its file system is mounted without permission to execute (noexec)."
            raise NativeUnavailableError(reason, _ELSEWHERE) from None
        raise NativeUnavailableError(f"{path} cannot be loaded: {failure}.", REMOVE) from None


def _is_noexec(path: Path) -> bool:
    """Return whether the file system of `path` forbids executing and loading files."""
    try:
        return sys.platform == "linux" and bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def instructions_of_bits(bits: int) -> list[str]:
    """Return the instruction sets that the library tells by bits, the best first."""
    return [
        name for number, name in zip(range(len(INSTRUCTIONS))[::-1], INSTRUCTIONS, strict=True) if bits >> number & 1
    ]


def processor_instructions(path: Path) -> list[str]:
    """Return the instruction sets that the processor has, the best first. path: of a library that says so."""
    with loading(path):
        return instructions_of_bits(ctypes.CDLL(str(path)).forerun_processor_instructions())


class _Kept:
    """The folder of a library, and what has been compiled into it from these sources.

    Attributes:
        instructions: the sets of which the library has kernels.
        checksums: by name, of the files.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        self.recipe = recipe
        self.read()

    def read(self) -> None:
        """Read what is there now. There is nothing where the facts are damaged, or of other sources."""
        self.instructions = list[str]()
        self.checksums = dict[str, str]()
        with suppress(ValueError):
            facts = Fields.read(self.folder / FACTS, ValueError)
            if facts.string("recipe") == self.recipe:
                checksums = facts.fields("checksums")
                self.checksums = {name: checksums.string(name) for name in checksums.values}
                self.instructions = facts.list_of("instructions", str)

    def is_sound(self, name: str) -> bool:
        """Return whether a file is there and its checksum matches."""
        try:
            with (self.folder / name).open("rb") as file:
                return self.checksums.get(name) == file_digest(file)
        except OSError:
            return False

    def wanted(self) -> Sequence[str] | None:
        """Return what `choose_instructions` does; None if nothing says what the processor has."""
        return choose_instructions(self.present()) if self.is_sound(PROCESSOR) else None

    def present(self) -> list[str]:
        """Return the instruction sets that the processor has."""
        return processor_instructions(self.folder / PROCESSOR)

    def chosen(self) -> str | None:
        """Return the best of the wanted instruction sets that a sound library is for, or None."""
        there = [name for name in self.wanted() or () if name in self.instructions]
        return there[0] if there and self.is_sound(LIBRARY) else None

    def is_complete(self, every: bool) -> bool:
        """Return whether a sound library is for the most wanted instruction set, or for every one of the processor."""
        wanted = self.wanted()
        if wanted is None:
            return False
        needed = self.present() if every else wanted[:1]
        return {*needed} <= {*self.instructions} and self.is_sound(LIBRARY)


@dataclass(frozen=True, slots=True)
class _Note:
    """What is kept about compiling one file: the failure of the last time, if it failed.

    Attributes:
        file: where it is kept.
        timeouts: how often it took too long, if it is to be tried again; else 0.
    """

    file: Path
    failure: CompilationError | None = None
    timeouts: int = 0

    @classmethod
    def read(cls, folder: Path, stem: str) -> _Note:
        """Read the note about compiling STEM.cpp into a folder. A damaged one says nothing."""
        file = folder.with_name(f"{folder.name}.{stem}.failed.json")
        try:
            facts = Fields.read(file, ValueError)
            kind = (
                TookTooLongError
                if (timeouts := facts.integer("timeouts", low=0, high=_TRIES - 1))
                else CompilationError
            )
            return cls(file, kind(facts.string("reason"), facts.string("remedy")), timeouts)
        except ValueError:
            return cls(file)

    def limit(self, first: float) -> float:
        """Return the seconds that compiling may take the next time. first: those that it may take at first."""
        return first * 2.0**self.timeouts

    def keep(self, failure: CompilationError, first: float) -> CompilationError:
        """Store a failure for later processes, as far as the file can be written, and return what they raise: a
        `TookTooLongError` only if it is to be tried again."""
        again = isinstance(failure, TookTooLongError) and self.timeouts + 1 < _TRIES
        timeouts = self.timeouts + 1 if again else 0
        then = f"This compiler is not tried again until {self.file} is removed."
        if again:
            then = f"The next start gives it {replace(self, timeouts=timeouts).limit(first):g} seconds."
        kept = (TookTooLongError if again else CompilationError)(failure.reason, f"{failure.remedy} {then}")
        with suppress(NativeUnavailableError):
            facts = {"reason": kept.reason, "remedy": kept.remedy, "timeouts": timeouts}
            write_json(self.file, facts, error=_unwritable)
        return kept


class _Build:
    """The work of compiling what a folder lacks.

    Args:
        limit: seconds that compiling and linking may take at first.
        extra: further arguments of the compiler.
        library: the name of the library's file.

    Attributes:
        core, sets: the names of the files, without their ends: of what is in every library, and of instruction sets.
    """

    def __init__(
        self,
        kept: _Kept,
        compiler: Compiler,
        sources: Path,
        limit: float,
        extra: tuple[str, ...] = (),
        library: str = LIBRARY,
    ) -> None:
        self._kept = kept
        self._library = library
        self._compiler = compiler
        self._sources = sources
        self._limit = limit
        self._flags = [*FLAGS, *extra]
        stems = sorted(path.stem for path in sources.glob("*.cpp"))
        self.core = [stem for stem in stems if stem not in INSTRUCTIONS]
        self.sets = [stem for stem in stems if stem in INSTRUCTIONS]
        self._timeouts = {stem: _Note.read(kept.folder, stem).timeouts for stem in stems}

    def complete(self, every: bool, wait: float) -> None:
        """Compile the most wanted instruction set, or every one of the processor.

        Where the compiler fails with one, those that are wanted less are tried until one succeeds; but if it takes too
        long and is to be tried again, none is: they might take as long. What has compiled is kept, and then the first
        failure raised.

        Raises:
            CompilationError: the compiler fails, or has failed.
            NativeUnavailableError: the folder cannot be written, or another process compiles into it for longer than
                `wait` seconds.
            ConfigError: as `choose_instructions`.
        """
        kept = self._kept
        with locked(kept.folder, _unwritable, wait=wait, remedy="A program compiles there: wait, or end it."):
            kept.read()
            if kept.is_complete(every):  # another process has just done it
                return
            for left in (*leftovers(kept.folder), *leftovers(kept.folder / "new")):
                remove(left)  # of killed processes: this process holds the lock
            if not kept.is_sound(PROCESSOR):
                self._add(PROCESSOR, ["processor"], [])
            if every:
                self._add(LIBRARY, self.core, kept.present())
                return
            failures = list[CompilationError]()
            for name in kept.wanted() or ():
                if name in kept.instructions and kept.is_sound(LIBRARY):
                    break
                try:
                    self._add(LIBRARY, self.core, [name])
                    break
                except CompilationError as failure:
                    failures.append(failure)
                    if isinstance(failure, TookTooLongError):
                        break
            if failures:
                raise failures[0]

    def _add(self, target: str, core: Sequence[str], sets: Sequence[str]) -> None:
        """Compile and link files, but for those of which a note says that the compiler fails with them. What has
        compiled is kept, then the first failure raised."""
        notes = {stem: _Note.read(self._kept.folder, stem) for stem in (*core, *sets)}
        # One that took too long is tried again, but not where that has just happened, in another process.
        failures = {
            stem: note.failure
            for stem, note in notes.items()
            if note.failure and (not note.timeouts or note.timeouts != self._timeouts[stem])
        }
        tried = [stem for stem in sets if stem not in failures]
        if not failures.keys() & {*core} and (tried or not sets):
            limit = max(notes[stem].limit(self._limit) for stem in (*core, *tried))
            if tried:
                again = f" It took too long before: now it may take {limit:g} seconds." * (limit > self._limit)
                _log.warning("Compiling the kernels for %s, once: this can take a minute.%s", ", ".join(tried), again)
            failed = self.link(target, core, tried, limit)
            for stem in (*core, *tried):
                if stem in failed:
                    failures[stem] = notes[stem].keep(failed[stem], self._limit)
                else:
                    remove(notes[stem].file)
        for failure in failures.values():
            raise failure

    def link(self, target: str, core: Sequence[str], sets: Sequence[str], limit: float) -> dict[str, CompilationError]:
        """Compile the files of which the folder has no sound objects, side by side, and link all to a library.

        It is linked if the whole core has compiled, and any of the instruction sets; those that the folder's library is
        for are in it too. All that compiles is kept.

        Args:
            target: the library's name.
            core, sets: the names of the files, without their ends.
            limit: seconds that compiling and linking may take.

        Returns:
            By name, what failed.

        Raises:
            NativeUnavailableError: the folder cannot be written, or the compiler not started.
        """
        kept = self._kept
        end = time.monotonic() + limit
        former = kept.instructions if target == self._library else []
        stems = [*core, *dict.fromkeys((*former, *sets))]
        with new_files(kept.folder, _unwritable) as new:
            lacking = [stem for stem in stems if not kept.is_sound(f"{stem}.o")]
            sources = {stem: ["-c", str(self._sources / f"{stem}.cpp")] for stem in lacking}
            failed = self._written({stem: new / f"{stem}.o" for stem in lacking}, sources, limit)
            good = [stem for stem in stems if stem not in failed]
            if {*core} <= {*good} and (not sets or {*sets} & {*good}):
                objects = [str((new if stem in lacking else kept.folder) / f"{stem}.o") for stem in good]
                rest = max(0.0, end - time.monotonic())
                if wrong := self._written({target: new / target}, {target: objects}, rest):
                    failed |= dict.fromkeys(lacking or stems, wrong[target])
            if any(new.iterdir()):
                self._write_facts(new, [stem for stem in good if stem in INSTRUCTIONS])
        kept.read()
        return failed

    def _written(
        self, files: Mapping[str, Path], arguments: Mapping[str, Sequence[str]], limit: float
    ) -> dict[str, CompilationError]:
        """Have the compiler write files. Returns by name what failed; of these there is no file."""
        commands = {name: [*self._flags, "-o", str(path), *arguments[name]] for name, path in files.items()}
        failed = self._compiler.outcomes(commands, limit) if commands else {}
        for name, path in files.items():
            if name in failed:
                path.unlink(missing_ok=True)
            elif not path.exists():
                reason = (
                    f"{_subject(name)} could not be compiled: {self._compiler.command[0]} has written no {path.name}."
                )
                failed[name] = CompilationError(reason, INSTALL)
        return failed

    def _write_facts(self, new: Path, instructions: Sequence[str]) -> None:
        """Write what the folder will hold when the new files are in it. instructions: those of a new library."""
        kept = self._kept
        checksums = dict(kept.checksums)
        for path in sorted(new.iterdir()):
            with path.open("rb") as file:
                checksums[path.name] = file_digest(file)
        facts = {
            "recipe": kept.recipe,
            "compiler": self._compiler.version.partition("\n")[0],
            "instructions": instructions if (new / self._library).exists() else kept.instructions,
            "checksums": checksums,
        }
        write_json(new / FACTS, facts, error=_unwritable)


def _recipe(sources: Path, system: str, architecture: str) -> str:
    """Return a hash of the sources, flags and architecture. Raises NativeUnavailableError."""
    try:
        files = [path for path in sorted(sources.rglob("*")) if path.suffix in (".cpp", ".h")]
        parts = [f"{path.relative_to(sources).as_posix()}\n{digest(path.read_bytes())}\n".encode() for path in files]
    except OSError as failure:
        reason = f"The sources of the kernels cannot be read: {sources}: {failure.strerror}."
        raise NativeUnavailableError(reason, "Install forerun anew.") from None
    if not any(path.suffix == ".cpp" for path in files):
        raise NativeUnavailableError(f"The sources of the kernels are not in {sources}.", "Install forerun anew.")
    return digest(*parts, "\n".join((*FLAGS, system, architecture)).encode())
