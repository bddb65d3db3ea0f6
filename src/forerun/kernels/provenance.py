"""The machine, kernels and software versions that a measurement ran on, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.utils import machine
from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    import psutil
else:
    psutil = DeferredModule("psutil")

# The machine and the software that figures depend on.


def machine_facts() -> dict[str, Any]:
    """Return the processor, kernels, cores, threads, versions and commit that figures depend on."""
    import torch
    import transformers

    from forerun import __version__
    from forerun.kernels.cpu import kernels_in_use

    return {
        "cpu": machine.model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels_in_use(),
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "forerun": __version__,
        "commit": _commit(),
    }


def describe_machine(facts: Mapping[str, Any]) -> str:
    """Describe the machine in one line. facts: as `machine_facts` returns them."""
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    kernels = f"kernels {facts['kernels']}, " if facts["kernels"] else ""
    return (
        f"{facts['cpu']} ({facts['cpu_capability']}), {kernels}{facts['cores']} cores, {facts['threads']} threads; "
        f"Python {facts['python']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"forerun {facts['forerun']}{commit}"
    )


def _commit() -> str | None:
    """Return the commit of the checkout that tracks this file, with "+" if it is modified; None without a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(here.parent), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    here = Path(__file__).resolve()
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parents[1]))
    return f"{commit}+" if commit and changed else commit


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and software that produced some figures.

    Attributes:
        forerun, torch, transformers, python: versions.
        commit: of forerun's checkout; None when it was installed from elsewhere.
        dirty: whether tracked files of that checkout were changed.
        system: operating system and architecture.
        processor: its name.
        instructions: the best instruction set that torch finds in it.
        kernels: which kernels ran, with their instruction set; None if no model requested native kernels.
        cores: that this process could use.
        threads: of torch.
        accelerator: None without one.
        date: when it began, ISO 8601 in UTC.
        seconds: that it took.
        load_before, load_after: load averages over 1, 5 and 15 minutes; empty if the system has none.
        stolen: share of the processor time that a hypervisor gave to other machines; None if unknown.
        others: processors that other processes kept busy, on average; None if unknown.
    """

    forerun: str
    torch: str
    transformers: str
    python: str
    commit: str | None
    dirty: bool
    system: str
    processor: str
    instructions: str
    kernels: str | None
    cores: int
    threads: int
    accelerator: str | None
    date: str
    seconds: float
    load_before: Sequence[float] = ()
    load_after: Sequence[float] = ()
    stolen: float | None = None
    others: float | None = None

    @property
    def machine(self) -> tuple[str, int, str | None]:
        """Return the key that distinguishes results of different machines."""
        return self.processor, self.cores, self.accelerator

    @property
    def version(self) -> str:
        """Return the commit, with "+" if the checkout is modified, or else the version."""
        return f"{self.commit}{'+' * self.dirty}" if self.commit else self.forerun


def describe_environment(environment: Environment) -> str:
    """Describe the environment in one line."""
    facts = {"cpu": environment.processor, "cpu_capability": environment.instructions, **asdict(environment)}
    commit = f"{environment.commit}{'+' * environment.dirty}" if environment.commit else None
    return describe_machine({**facts, "commit": commit})


_BUSY = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
_IDLE = ("idle", "iowait")
"""As psutil names them, of all systems together."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds of all processors together, since the system began.

    Attributes:
        stolen: given to other machines by a hypervisor; None where the system does not tell.
        total: all of them, idle ones too.
    """

    busy: float
    stolen: float | None
    total: float

    @classmethod
    def now(cls) -> _Spent | None:
        """Return those until now; None if the system does not tell."""
        try:
            found = psutil.cpu_times()._asdict()
        except (OSError, RuntimeError):
            return None
        busy = sum(found.get(name, 0.0) for name in _BUSY)
        stolen = found.get("steal")
        return cls(busy, stolen, busy + sum(found.get(name, 0.0) for name in _IDLE) + (stolen or 0.0))


@dataclass(frozen=True, slots=True)
class Watch:
    """The state of the machine at one moment, from which `environment` measures.

    Attributes:
        date: of that moment.
        started: the same by the clock that measures.
        load: averages then.
        spent: seconds of all processors then, since the system began; None if unknown.
        own_seconds: processor time that this process and its children had taken.
    """

    date: datetime
    started: float
    load: Sequence[float]
    spent: _Spent | None
    own_seconds: float

    @classmethod
    def begin(cls) -> Watch:
        """Record the state of the machine. Call it before loading anything: the load average is then that of other
        processes."""
        return cls(datetime.now(UTC), time.perf_counter(), _load(), _Spent.now(), _own_seconds())

    def environment(self) -> Environment:
        """Return the environment, with what happened since `begin`."""
        facts = machine_facts()
        seconds = time.perf_counter() - self.started
        now = _Spent.now()
        stolen = others = None
        if self.spent is not None and now is not None and now.total > self.spent.total:
            if now.stolen is not None and self.spent.stolen is not None:
                stolen = (now.stolen - self.spent.stolen) / (now.total - self.spent.total)
            own = _own_seconds() - self.own_seconds
            others = max(now.busy - self.spent.busy - own, 0.0) / max(seconds, 1e-9)
        commit = facts["commit"]
        return Environment(
            forerun=facts["forerun"],
            torch=facts["torch"],
            transformers=facts["transformers"],
            python=facts["python"],
            commit=None if commit is None else commit.removesuffix("+"),
            dirty=commit is not None and commit.endswith("+"),
            system=facts["system"],
            processor=facts["cpu"],
            instructions=facts["cpu_capability"],
            kernels=facts["kernels"],
            cores=facts["cores"],
            threads=facts["threads"],
            accelerator=facts["accelerator"],
            date=self.date.isoformat(timespec="seconds").replace("+00:00", "Z"),
            seconds=seconds,
            load_before=self.load,
            load_after=_load(),
            stolen=stolen,
            others=others,
        )


def _load() -> tuple[float, ...]:
    if sys.platform == "win32":
        return ()
    try:
        return os.getloadavg()
    except OSError:
        return ()


def _own_seconds() -> float:
    """Return the processor time of this process and of its finished children, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
