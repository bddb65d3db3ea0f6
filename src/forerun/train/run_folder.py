"""A run's folder, held by one process: nothing is overwritten without being asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from forerun.errors import ConfigError
from forerun.files.write import locked, refuse_to_overwrite
from forerun.train.checkpoint import BEST, CHECKPOINT
from forerun.train.loop import METRICS
from forerun.train.resumed_options import FILE_NAME

_STAGES = ("", "text", "samples", "distil", "states")
_FILES = (
    FILE_NAME,
    CHECKPOINT,
    BEST,
    METRICS,
    "tokenizer.json",
    "tokenizer_config.json",
    "shard-*.npy",
    "row-*.safetensors",
)
"""What a run leaves in the folders of its stages, and what another run would take for its own."""


@contextmanager
def run_in(work: Path, out: Path, console: Console, *, resume: bool, force: bool) -> Iterator[None]:
    """Train inside this block: checks, the folder's lock, and what is said after Ctrl-C.

    Args:
        work: the run's folder, for checkpoints and samples.
        out: the model folder that will be written.
        resume: go on with the run in `work`.
        force: begin anew, and replace the model in `out`.

    Raises:
        ConfigError: something is there that would be lost; nothing is there to resume; another process has the folder;
            a file cannot be read or written.
    """
    with locked(work, ConfigError, wait=False, remedy="Wait until that run ends, or give another --work."):
        former = _files(work)
        if resume and not former:
            raise ConfigError(f"{work} holds no run to resume. Leave --resume out to start one.")
        if former and not resume and not force:
            raise ConfigError(f"{work} holds another run. Add --resume to go on with it, or --force to begin anew.")
        if not resume and not force:
            remedy = "Give another name, --force to replace it, or --resume to go on with the run that made it."
            refuse_to_overwrite(out, ConfigError, remedy)
        if not resume:
            for path in former:
                path.unlink()
        work.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except KeyboardInterrupt:
            resumable = "the same command with --resume goes on" if _files(work) else "nothing was begun yet"
            console.print(f"Stopped. What was done is in {work}; {resumable}.", soft_wrap=True, highlight=False)
            raise
        except OSError as failure:
            raise ConfigError(
                f"The run in {work} cannot go on: {failure}. Make room or permission, then go on by --resume."
            ) from failure


def _files(work: Path) -> list[Path]:
    """What a run has left in its folder."""
    return [path for stage in _STAGES for pattern in _FILES for path in (work / stage).glob(pattern)]
