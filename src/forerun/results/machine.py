"""The machine and the software that figures depend on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun import processor


def machine() -> dict[str, Any]:
    """Everything a reader needs to judge a figure: processor, kernels, cores, threads, versions, commit."""
    import torch
    import transformers

    from forerun import __version__
    from forerun.kernels.native import in_use

    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": processor.model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": in_use(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": accelerator,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "forerun": __version__,
        "commit": _commit(),
    }


def describe(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    kernels = f"kernels {facts['kernels']}, " if facts["kernels"] else ""
    return (
        f"{facts['cpu']} ({facts['cpu_capability']}), {kernels}{facts['cores']} cores, {facts['threads']} threads; "
        f"Python {facts['python']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"forerun {facts['forerun']}{commit}"
    )


def _commit() -> str | None:
    """The commit of the checkout this file is tracked in, "+" for a changed one; None when installed elsewhere."""

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
