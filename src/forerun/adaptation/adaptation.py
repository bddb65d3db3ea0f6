"""Adaptation while serving: a thread of the lowest priority, in which the drafter learns while nothing is computed."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from forerun.adaptation.learners import learner_of
from forerun.adaptation.pupil import Progress, Pupil
from forerun.adaptation.ring import Rings, excerpts_file, read_excerpts
from forerun.config import AdaptOptions
from forerun.drafters.base import Adaptable, Drafter
from forerun.engine.adapting import Adapting
from forerun.errors import ConfigError, DrafterError, ForerunError
from forerun.utils.files import Closing, digest, remove, whole_folder, write_bytes

_log = logging.getLogger(__name__)
ROUND_TOKENS = 512
"""Verified tokens of a tenant after which it learns again, and is judged."""
_LEAST_IDLE = 0.05
"""Seconds without a request after which learning begins: between two of one client there are fewer."""
_LOOKS = 0.02
"""Seconds between two looks for requests."""
_NICENESS = 19
_KEEP_EVERY = 60.0
"""Seconds between two writings of a ring to the disk: what a kill may lose."""
_MOST_KEPT = 16
"""Tenants whose folders stay on the disk, those that were written last: salts are chosen by whoever asks."""
CAN_ADAPT = "an EAGLE head (eagle:model=FOLDER) or a draft model (draft-model:model=NAME)"


class Adaptation(Closing, Adapting):
    """Lets a bound drafter go on learning from what its target verifies, from `start` on in a thread of its own.

    Each tenant has a ring of its own, and a copy of the drafter's tensors that learns from this ring alone.

    Args:
        drafter: bound, before its first sequence.
        is_busy: whether there are requests. Any thread may call it, after `start`.
        round_tokens: as ROUND_TOKENS.

    Raises:
        DrafterError: nothing of the drafter can be adapted.
        ConfigError: the target does not compute on the CPU.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        options: AdaptOptions,
        is_busy: Callable[[], bool],
        *,
        round_tokens: int = ROUND_TOKENS,
    ) -> None:
        self._options = options
        self._is_busy = is_busy
        self._round_tokens = round_tokens
        self._adaptable = adaptable_of(drafter)
        learner = self._learner = learner_of(self._adaptable)
        self._original = self._adaptable.tensors()
        self.rings = Rings(int(options.adapt_memory * 2**20))
        self._pupils: dict[str | None, Pupil] = {}
        self._seen: dict[str | None, int] = {}  # by tenant, tokens that had come when it learnt last
        self._kept: dict[str | None, tuple[int, float]] = {}  # and when its ring was written last, with the time
        self._adaptable.watch(self.rings, learner.needs)
        self._closing = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forerun-adapt", daemon=True)

    def start(self) -> None:
        """Begin to learn. What was kept drafts from the first request on."""
        atexit.register(self.close)  # Python may not end a thread within a backward pass
        self._thread.start()
        self._started.wait()

    def progress(self, tenant: str | None = None) -> Progress:
        """Return what has come of a tenant's learning."""
        pupil = self._pupils.get(tenant)
        return Progress(tokens=self.rings.tenants().get(tenant, 0)) if pupil is None else pupil.progress

    def total(self) -> dict[str, float]:
        """Return the sums over all tenants, for metrics; of acceptance the means over those that have a copy."""
        every = [pupil.progress for pupil in list(self._pupils.values())]
        found: dict[str, float] = {
            name: sum(getattr(each, name) for each in every) for name in ("rounds", "steps", "swaps", "swaps_back")
        }
        swapped = [each for each in every if each.swaps]
        for name in ("before", "after"):
            found[name] = sum(getattr(each, name) for each in swapped) / max(1, len(swapped))
        return found | {"tokens": sum(self.rings.tenants().values()), "memory": self.rings.nbytes}

    def save(self, folder: str | Path, tenant: str | None = None) -> None:
        """Write the copy that drafts for a tenant as a folder that can be loaded as a drafter, with its card.

        Raises:
            ConfigError: no copy drafts for it, or the folder cannot be written.
        """
        pupil = self._pupils.get(tenant)
        if pupil is None or pupil.serving is None:
            raise ConfigError(
                f"There is no copy of {self._adaptable.name} to be saved: none was better beyond chance so far. "
                "Try again when more has been served."
            )
        self._write(Path(folder), pupil)

    def _write(self, folder: Path, pupil: Pupil) -> None:
        assert pupil.serving is not None
        record = {"adapted": asdict(pupil.progress)}
        self._learner.save(folder, pupil.serving, record)
        progress = pupil.progress
        card = _CARD.format(name=self._adaptable.name, target=self._adaptable.target.name, **asdict(progress))
        write_bytes(folder / "README.md", card.encode(), error=ConfigError)

    def close(self) -> None:
        """End the thread after its present piece of work."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._started.is_set() and threading.current_thread() is not self._thread:
            self._thread.join()
            self._keep_rings(0.0)

    # The thread.

    def _run(self) -> None:
        try:
            _be_modest()
            self._restore(None)
        finally:
            self._started.set()
        while not self._closing.is_set():
            self._keep_rings(_KEEP_EVERY)
            tenant = self._next()
            if tenant is _NOBODY or not self._waits_for_idle():
                self._closing.wait(10 * _LOOKS)
                continue
            assert tenant is None or isinstance(tenant, str)
            try:
                self._learn(tenant)
            except Exception:
                _log.exception("a round of learning failed; what drafts stays")
                self._pupils.pop(tenant, None)
                self._adaptable.swap(tenant, None)

    def _next(self) -> object:
        """Return the tenant of which most has come since it learnt last; _NOBODY if that is not enough. Copies of
        tenants whose rings are gone, or have begun anew, are dropped."""
        seen = self.rings.tenants()
        for tenant in [each for each in self._pupils if seen.get(each, -1) < self._seen.get(each, 0)]:
            del self._pupils[tenant]
            self._seen.pop(tenant, None)
            self._adaptable.swap(tenant, None)
        for tenant in seen.keys() - self._pupils.keys():
            self._restore(tenant)
        new = {tenant: count - self._seen.get(tenant, 0) for tenant, count in seen.items()}
        best = max(new, key=new.__getitem__, default=None)
        return best if new.get(best, 0) >= self._round_tokens else _NOBODY

    def _learn(self, tenant: str | None) -> None:
        older, newest = self.rings.split(tenant)
        self._seen[tenant] = num_seen = self.rings.tenants().get(tenant, 0)
        if not older or not newest:
            return
        pupil = self._pupils[tenant]
        swaps = pupil.progress.swaps, pupil.progress.swaps_back
        work = pupil.round(older, newest, num_seen)
        share = self._options.adapt_share
        while self._waits_for_idle():
            began = time.thread_time()
            if next(work, _NOBODY) is _NOBODY:
                break
            took = time.thread_time() - began
            if self._closing.wait(took * (1 - share) / share):
                return
        if swaps != (pupil.progress.swaps, pupil.progress.swaps_back):
            self._keep_copy(tenant, pupil)

    # On the disk.

    def _folder(self, tenant: str | None) -> Path | None:
        """Return where a tenant's copy and ring are kept; None: nowhere. Its name is not told."""
        name = "all" if tenant is None else f"tenant-{digest(tenant.encode())[:16]}"
        folder = self._options.adapt_folder
        return None if folder is None else Path(folder) / name

    def _restore(self, tenant: str | None) -> None:
        """Begin a tenant's learning where it was, if it was kept."""
        folder = self._folder(tenant)
        serving = None
        if folder is not None and (folder / _RING).is_file():
            like = len(self._learner.needs.layers), self._adaptable.target.embedding_rows(torch.tensor([0])).shape[1]
            with _told(folder):
                content = (folder / _RING).read_bytes()
                self.rings.restore(tenant, read_excerpts(content, like, self._adaptable.target.vocab_size))
        if folder is not None and (folder / _COPY).is_dir():
            with _told(folder):
                serving = self._learner.read(folder / _COPY)
                self._adaptable.swap(tenant, serving)
        if serving is not None or tenant in self.rings.tenants():
            self._pupils[tenant] = Pupil(
                tenant, self._adaptable, self._learner, self._original, serving, makes_way=self._makes_way
            )
            self._seen[tenant] = 0

    def _keep_copy(self, tenant: str | None, pupil: Pupil) -> None:
        folder = self._folder(tenant)
        if folder is not None and pupil.serving is not None:
            with _told(folder), whole_folder(folder / _COPY, ConfigError) as fresh:
                self._write(fresh, pupil)
        elif folder is not None:
            remove(folder / _COPY)

    def _keep_rings(self, every: float) -> None:
        """Write the rings to which something has come since so many seconds."""
        for tenant, count in self.rings.tenants().items() if self._options.adapt_folder is not None else ():
            folder = self._folder(tenant)
            num_kept, kept_at = self._kept.get(tenant, (0, -every))
            if folder is None or count == num_kept or time.monotonic() < kept_at + every:
                continue
            self._kept[tenant] = count, time.monotonic()
            older, newest = self.rings.split(tenant)
            with _told(folder):
                folder.mkdir(parents=True, exist_ok=True)
                write_bytes(folder / _RING, excerpts_file([*older, *newest]), error=ConfigError)
                _forget_oldest(folder.parent)

    def _makes_way(self) -> None:
        """Wait, in the middle of a piece of work, until a request that came is answered."""
        if self._is_busy():
            self._waits_for_idle()

    def _waits_for_idle(self) -> bool:
        """Wait until there has been no request for a moment; return False once this is closed."""
        idle_since = time.monotonic()
        while not self._closing.is_set():
            self._keep_rings(_KEEP_EVERY)
            if self._is_busy():
                idle_since = time.monotonic() + _LEAST_IDLE
            elif time.monotonic() >= idle_since:
                return True
            self._closing.wait(_LOOKS)
        return False


_NOBODY = object()
_RING = "ring.safetensors"
_COPY = "copy"
_CARD = """# A copy of {name} that learnt while it served

It drafts for {target}. It has learnt from {tokens:,} verified tokens in {steps:,} small steps, while the server was
idle. Judged on the newest tokens, from which nothing was learnt, {before:.2f} tokens a draft of three and one were
right before it was swapped in, and {after:.2f} after.
"""


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Warn of a copy or ring that cannot be read or written: what drafts goes on, and learning does."""
    try:
        yield
    except (ForerunError, OSError) as error:
        _log.warning("%s: a drafter's learning is not kept, or not taken up: %s", folder, error)


def _forget_oldest(folder: Path) -> None:
    """Remove the folders of tenants beyond _MOST_KEPT, those first whose rings were written first."""
    rings = sorted(folder.glob(f"tenant-*/{_RING}"), key=lambda each: each.stat().st_mtime)
    for each in rings[:-_MOST_KEPT]:
        remove(each.parent)


def adaptable_of(drafter: Drafter | None) -> Adaptable:
    """Return the first part of a drafter that can be adapted.

    Raises:
        DrafterError: there is none.
        ConfigError: the target does not compute on the CPU.
    """
    members = () if drafter is None else drafter.members
    found = next((adaptable for each in members if (adaptable := each.adaptable) is not None), None)
    if found is None:
        names = ", ".join(type(each).__name__ for each in members) or "no drafter"
        raise DrafterError(
            f"adapt is on, but nothing of {names} can go on learning. Give {CAN_ADAPT}, or leave it off."
        )
    if found.target.device.type != "cpu":
        raise ConfigError(
            f"adapt is on, but the target computes on {found.target.device}, and drafters learn on the CPU alone. "
            "Leave it off."
        )
    return found


def _be_modest() -> None:
    """Give this thread the lowest priority, and torch one thread in it, but not in those that begin later."""
    if sys.platform == "linux":  # elsewhere a process has a priority, and a thread none
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    most = torch.get_num_threads()
    torch.set_num_threads(1)
    others = threading.Thread(target=torch.set_num_threads, args=(most,))  # what new threads take over
    others.start()
    others.join()
