"""Published pages in files, by which prompts are not computed again after a restart.

A file has one page, or the states of recurrent layers after it. Its name is a hash of what computes the page and whose
it is, then of each page's tokens and the name before it: so it tells all tokens up to the page's end, and a tenant's
pages have names that no other's tokens have. Nothing of the text stands in it but keys and values.

    FOLDER/prompt-cache.json                  the version
    FOLDER/FINGERPRINT/NAME.page and .state   a line of JSON (version, file name, number format and shape of each
                                              tensor), padded to 64 bytes; the tensors; a checksum (`sealed_file`)

Many processes may use a folder: a file is there whole or not at all (its checksum tells after a power cut), is
never changed, and is the same whoever writes it. The time of its last change is that of its last use; a page is used a
little later than those after it, so that prefixes are removed from their ends.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.config import MEMORY_LOG
from forerun.errors import ConfigError, OutOfPagesError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache.page_pool import PagePool
from forerun.kv_cache.prefix_tree import Page, tokens_of_page
from forerun.utils.files import REMEDY, digest, is_sealed, remove, sealed_file, write_json
from forerun.utils.json_file import Fields

_log = logging.getLogger(MEMORY_LOG)
_VERSION = 2
_ABOUT = "prompt-cache.json"
_ALIGNMENT = 64
_SUFFIXES = (".page", ".state", ".tmp")
"""Of files that may be removed; the last is what a process was writing when it was killed."""
_MOST_WAITING = 256
"""Prefixes that wait to be written; beyond, they are not kept: the disk does not keep up."""
_PAUSE = 60.0
"""Seconds without writing after it has failed."""
_MOST_SECONDS = 10.0
"""That an engine which ends waits for what is to be written."""
_FUTURE = 60 * 10**9
"""Nanoseconds after now beyond which a file's time is wrong, so that it is removed first: the clock was set back."""
_UNCOUNTED = 20
"""The part of the size that may be written before the files are counted again, with those of other processes."""


class PromptCache:
    """Reads published pages from files, and writes them behind, in a thread of its own.

    What cannot be read or written is a line in the log: then a prompt is computed.

    Args:
        folder: of this user's own; it is made if it is missing.
        nbytes: that the files of all models in it may take together.
        pool: of the pages, in the form of the native kernels.
        fingerprint: of all that decides their bits (`LanguageModel.fingerprint`).
        has_states: the model has recurrent layers.

    Raises:
        ConfigError: the folder cannot be used, is another user's or may be written to by others, is of another version
            or no prompt cache; a page is larger than `nbytes`.
    """

    def __init__(self, folder: Path, nbytes: int, pool: PagePool, fingerprint: str, *, has_states: bool) -> None:
        if nbytes < 2 * pool.page_nbytes:
            raise ConfigError(
                f"prompt_cache_size is {nbytes:,} bytes, but {PAGE} tokens take {pool.page_nbytes:,}. Raise it."
            )
        _check_folder(folder, fingerprint)
        self._root = folder
        self._folder = folder / fingerprint
        self._nbytes = nbytes
        self._pool = pool
        self._has_states = has_states
        self._uncounted = 0  # bytes that may be written before the files are counted again
        self._resumes = 0.0  # when writing is tried again
        self._present: set[str] = set()  # names of the prefix that is written, up to the page that is
        self._has_room = True  # as far as the log says
        self._waiting: deque[tuple[Sequence[int], str | None]] = deque()
        self._thread = ThreadPoolExecutor(1, "prompt-cache")  # at exit, Python waits for what it has begun
        try:
            total = self._count()
            for each in folder.glob("?" * len(fingerprint)):
                with suppress(OSError):  # one that holds files
                    each.rmdir()
        except OSError as failure:
            raise ConfigError(f"prompt_cache {folder} cannot be used: {failure.strerror}. {REMEDY}") from None
        _log.info("prompt cache %s: %.2f of %.2f GiB in use", folder, total / 2**30, nbytes / 2**30)

    def read(self, token_ids: Sequence[int], tenant: str | None, most: float = math.inf) -> tuple[int, bool]:
        """Publish the pages that files have of these tokens, but for the last one, after those that are published. The
        last gets its states. Only the engine's thread may call this.

        most: pages that are read.

        Returns:
            How many pages were read, and whether there are more. Until there are none, no states are read.
        """
        pages: list[Page] = []
        names = []
        more = False
        try:
            self._pool.adopt(pages, token_ids, (len(token_ids) - 1) // PAGE, tenant)
            first = len(pages)
            for index, name in enumerate(self._names(token_ids[:-1], tenant)):
                names.append(name)
                if index < first:
                    continue
                if not self._pool.num_available:
                    break
                if index - first >= most:
                    more = os.path.lexists(self._folder / f"{name}.page")
                    break
                found = self._tensors(f"{name}.page", self._pool.page_nbytes)
                if found is None:
                    break
                try:
                    self._pool.take(pages, 1)
                except OutOfPagesError:  # another thread was faster
                    break
                _bytes_of(pages[-1])[:] = found[0].numpy()
            self._pool.publish(pages, first, len(pages), token_ids, tenant)
            for end in range(len(pages), 0, -1) if self._has_states and not more else ():
                if pages[end - 1].state is not None:
                    break
                if (state := self._tensors(f"{names[end - 1]}.state")) is not None:
                    self._pool.keep_states(pages, {end * PAGE: state})
                    break
            return len(pages) - first, more
        finally:
            self._pool.give_back(pages)

    def write(self, token_ids: Sequence[int], tenant: str | None) -> None:
        """Write the published pages of these tokens, as far as they are not there, soon and in another thread."""
        if len(token_ids) >= PAGE and len(self._waiting) < _MOST_WAITING:
            self._waiting.append((token_ids, tenant))
            with suppress(RuntimeError):  # Python ends, and takes no more work
                self._thread.submit(self._write_next)

    def flush(self) -> None:
        """Wait until what is to be written is, for some seconds at most. What is left then is not written."""
        try:
            self._thread.submit(int).result(_MOST_SECONDS)
        except TimeoutError:
            self._resumes = time.monotonic() + _PAUSE  # so that what is being written ends after its page
            self._waiting.clear()
            _log.warning("Prompts are not kept on disk: writing them takes longer than %g seconds.", _MOST_SECONDS)
        except RuntimeError:  # as above: Python waits itself
            pass

    def _names(self, token_ids: Sequence[int], tenant: str | None) -> Iterator[str]:
        """Yield the name of each whole page of these tokens, without the suffix of a file."""
        name = digest(self._folder.name.encode(), (tenant or "").encode("utf-8", "surrogatepass"))
        for index in range(len(token_ids) // PAGE):
            name = digest(name.encode(), tokens_of_page(token_ids, index))
            yield name

    def _tensors(self, name: str, nbytes: int | None = None) -> list[Tensor] | None:
        """Return what a file holds; None if there is none that can be used. A damaged one is removed.

        nbytes: of the one tensor of bytes that it is to hold.
        """
        path = self._folder / name
        try:
            found = _read(path)
            if nbytes is not None and [(each.dtype, *each.shape) for each in found] != [(torch.uint8, nbytes)]:
                raise ValueError("it is not of this size")
            return found
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s cannot be read: %s. The prompt is computed.", path, error.strerror)
        except Exception as error:  # of torch's and JSON's too
            _log.warning("%s cannot be used: %s. The prompt is computed.", path, str(error) or repr(error))
            if not isinstance(error, MemoryError):
                remove(path)
        return None

    def _write_next(self) -> None:
        """Write the missing pages of the prefix that waits longest, and the states after its end; note that the others
        were used."""
        try:
            token_ids, tenant = self._waiting.popleft()
        except IndexError:  # nobody waits any longer
            return
        if time.monotonic() < self._resumes:
            return
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            pages = self._pool.published(token_ids, len(token_ids) // PAGE, tenant)
            last = max((index for index, (_, _, state) in enumerate(pages) if state is not None), default=-1)
            now = time.time_ns()
            self._present.clear()
            for index, ((page, node, state), name) in enumerate(
                zip(pages, self._names(token_ids, tenant), strict=False)
            ):
                if time.monotonic() < self._resumes:
                    return
                used = now - 1000 * index
                self._present.add(name)
                if not self._is_there(f"{name}.page", used):
                    content = torch.from_numpy(_bytes_of(page).copy())  # by this thread alone, as torch's would not be
                    is_evicted = page.node is not node  # and has another prefix's numbers, perhaps
                    if is_evicted or not self._write(f"{name}.page", [content], used):
                        return
                if index == last and state is not None and not self._is_there(f"{name}.state", used):
                    self._write(f"{name}.state", state, used)
        except Exception as error:
            self._resumes = time.monotonic() + _PAUSE
            _log.warning("Prompts are not kept on disk for %.0f seconds: %s", _PAUSE, error)

    def _is_there(self, name: str, used: int) -> bool:
        """Note that a file was used. used: when, in nanoseconds. Returns whether there is one."""
        try:
            os.utime(self._folder / name, ns=(used, used))
        except FileNotFoundError:
            return False
        return True

    def _write(self, name: str, tensors: Sequence[Tensor], used: int) -> bool:
        """Write a file in the place of some that were used before. Returns whether there is room."""
        nbytes = sum(each.nbytes for each in tensors) + 1024
        if nbytes > self._uncounted:
            room = self._nbytes - self._count(nbytes, used)
            self._uncounted = min(max(self._nbytes // _UNCOUNTED, nbytes), room)
        if nbytes > self._uncounted:
            if self._has_room:
                self._has_room = False
                _log.warning(
                    "The prompt cache %s has no room for more of a prompt: others of %.2f GiB were used as lately. A "
                    "larger prompt_cache_size keeps more. This is not told again.",
                    *(self._root, self._nbytes / 2**30),
                )
            return False
        self._uncounted -= nbytes
        _write(self._folder / name, tensors)
        return self._is_there(name, used)

    def _count(self, wanted: int = 0, used: int = 0) -> int:
        """Return the bytes of all files, after some that were used before `used` were removed, if so many more bytes
        are wanted than there is room for."""
        found = []
        latest = time.time_ns() + _FUTURE
        for path in self._root.glob("?" * len(self._folder.name) + "/*"):
            with suppress(FileNotFoundError):  # another process has removed it
                about = path.stat()
                found.append((about.st_mtime_ns if about.st_mtime_ns <= latest else 0, about.st_size, path))
        total = sum(size for _, size, _ in found)
        if total + wanted > self._nbytes:
            for last_used, size, path in sorted(found):
                if last_used >= used or total + wanted <= self._nbytes * (1 - 1 / _UNCOUNTED):
                    break
                if path.suffix in _SUFFIXES and path.stem not in self._present:
                    path.unlink(missing_ok=True)
                    total -= size
        return total


def _check_folder(folder: Path, fingerprint: str) -> None:
    """Make the folder if it is missing. Raises ConfigError if it is no prompt cache of this version, to which this user
    alone can write."""
    remedy = "Give another folder to prompt_cache."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [each.name for each in folder.iterdir() if not each.name.startswith(".")]
        inner = folder / fingerprint
        found = {folder: folder.stat()} | ({inner: inner.lstat()} if os.path.lexists(inner) else {})
    except OSError as failure:
        raise ConfigError(f"prompt_cache {folder} cannot be used: {failure.strerror}. {REMEDY}") from None
    if sys.platform != "win32":  # where rights stand elsewhere
        for path, status in found.items():
            if not stat.S_ISDIR(status.st_mode):
                raise ConfigError(f"prompt_cache {path} is no folder. Remove it.")
            if status.st_uid != os.geteuid():
                raise ConfigError(f"prompt_cache {path} is another user's, who could change answers. {remedy}")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"prompt_cache {path} may be written to by other users, who could change answers. Take that right "
                    "away (chmod go-w), or give another folder."
                )
    if _ABOUT not in others:
        if others:
            raise ConfigError(f"prompt_cache {folder} has other files, such as {others[0]}. {remedy}")
        write_json(folder / _ABOUT, {"version": _VERSION}, error=ConfigError)
    about = Fields.read(folder / _ABOUT, ConfigError, remedy=remedy)
    if (version := about.integer("version")) != _VERSION:
        raise ConfigError(f"prompt_cache {folder} is of version {version}, not {_VERSION}. {remedy}")


def _bytes_of(page: Page) -> NDArray[np.uint8]:
    """Return a view of a page's memory."""
    return page.content[0].view(torch.uint8).numpy()


def _write(path: Path, tensors: Sequence[Tensor]) -> None:
    forms = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in tensors]
    head = json.dumps({"version": _VERSION, "file": path.name, "tensors": forms}).encode()
    with sealed_file(path, ConfigError, synced=False) as file:
        file.write(head.ljust(-(-(len(head) + 1) // _ALIGNMENT) * _ALIGNMENT - 1) + b"\n")
        for each in tensors:
            file.write(each.contiguous().view(torch.uint8).numpy())


def _read(path: Path) -> list[Tensor]:
    """Return the tensors of a file. It is read, not mapped: a map of a file that shrinks ends the process.

    Raises:
        OSError: it cannot be read.
        ValueError, or whatever strange content leads to: it is not as it was written, or is another file by this name.
    """
    content = bytearray(path.read_bytes())
    if not is_sealed(content):
        raise ValueError("it is damaged, not as it was written or cut short")
    start = content.index(b"\n") + 1
    head = json.loads(content[:start])
    if (head["version"], head["file"]) != (_VERSION, path.name):
        raise ValueError(f"it has the content of {head['file']}")
    tensors = []
    for name, shape in head["tensors"]:
        dtype = getattr(torch, name)
        count = math.prod(shape)
        numbers = torch.empty(0, dtype=dtype)
        if count:
            numbers = torch.frombuffer(content, dtype=dtype, count=count, offset=start)
        tensors.append(numbers.view(shape))
        start += numbers.nbytes
    return tensors
