"""The state of a run on disk: weights and counts in one file with a checksum, options, and the folder's lock."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.drafters.models.heads.fingerprint import same_target
from forerun.errors import ConfigError
from forerun.train.accelerator import dtype_name, product_type, why_auto
from forerun.train.defaults import AUTO, FORMATS
from forerun.train.optim import Optimisers
from forerun.utils.files import check_seal, locked, refuse_to_overwrite, remove, sealed_file, write_json
from forerun.utils.json_file import Fields

METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
FITTED = "fitted.json"
"""What a fit took, whose weights a checkpoint has."""
_REMEDY = "Remove it, and --resume begins this stage again."
FILE_NAME = "options.json"
_OTHER = "Give another OUT, or --force to begin anew."
TARGET = "target"
"""Key of the target's fingerprint in the options of a run."""
DTYPE = "dtype"
"""Key of the number format of its products."""
_STAGES = ("", "samples", "imitation", "distil", "states")
_FILES = (
    FILE_NAME,
    CHECKPOINT,
    BEST,
    FITTED,
    METRICS,
    "tokenizer.json",
    "tokenizer_config.json",
    "shard-*.npy",
    "held-out-*.npy",
    "row-*.safetensors",
)
"""Files of a run in the folders of its stages, which another run would mistake for its own."""


@dataclass(slots=True)
class LoopState:
    """Progress of a run.

    Attributes:
        step, tokens: steps done, and tokens seen by them.
        seconds: spent training, over all its lives.
        losses: of the last steps.
        scores: step and score of each evaluation.
        planned: the step at which the schedule ends, which a resumed run keeps; 0 before it is decided.
        first_loss: mean loss of the first steps; 0 before they are done.
        is_finished: no step will follow; the checkpoint holds the weights that the run ends with, and nothing else.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    planned: int = 0
    first_loss: float = 0.0
    is_finished: bool = False

    @property
    def best_step(self) -> int:
        """Return the step of the best evaluation, the last of several; 0 without one."""
        return max(((score, step) for step, score in self.scores), default=(0.0, 0))[1]


def save_checkpoint(folder: Path, model: nn.Module, optimisers: Optimisers, state: LoopState) -> None:
    """Write everything a resume needs into one file that is replaced as a whole or not at all.

    Raises:
        ConfigError: it cannot be written; the former checkpoint is still there.
    """
    content = {
        "model": _trained(model),
        "optimisers": [] if state.is_finished else optimisers.state_dict(),
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "losses": state.losses[-256:],
        "scores": [list(pair) for pair in state.scores],
        "planned": state.planned,
        "first_loss": state.first_loss,
        "is_finished": state.is_finished,
    }
    _write(folder / CHECKPOINT, content)
    if state.is_finished:
        (folder / BEST).unlink(missing_ok=True)  # whose weights these are


def save_best(folder: Path, model: nn.Module, step: int) -> None:
    """Keep the weights of the best evaluation so far. Raises ConfigError as `save_checkpoint`."""
    _write(folder / BEST, {"model": _trained(model), "step": step})


def load_best(folder: Path, model: nn.Module, step: int) -> None:
    """Restore what `save_best` kept.

    Raises:
        ConfigError: it is missing, damaged, or of another step or model.
    """
    remedy = f"Remove it and {folder / CHECKPOINT}, and --resume begins this stage again."
    with _read(folder / BEST, "does not hold the best weights", remedy) as content:
        if content["step"] != step:
            raise ValueError(f"it is of step {content['step']}, not {step}")
        _restore(model, content["model"])


def _trained(model: nn.Module) -> dict[str, Any]:
    """Return the model's state without parameters that are not trained: they are those of the start."""
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def _restore(model: nn.Module, state: dict[str, Any]) -> None:
    """Take over what `_trained` gave. Raises ValueError where it is of another model."""
    expected = _trained(model).keys()
    if state.keys() != expected:
        raise ValueError(f"it has other tensors: {', '.join(sorted(state.keys() ^ expected)[:3])}")
    model.load_state_dict(state, strict=False)


@contextmanager
def _read(path: Path, fault: str, remedy: str = _REMEDY) -> Iterator[dict[str, Any]]:
    """Load a file of `_write` for a block whose failures mean that the file holds something else."""
    check_seal(path, ConfigError, remedy)
    try:
        yield torch.load(path, map_location="cpu", weights_only=True)
    except Exception as failure:  # whatever PyTorch makes of it
        raise ConfigError(f"{path} {fault}: {failure}. {remedy}") from failure


def _write(path: Path, content: dict[str, Any]) -> None:
    with sealed_file(path, ConfigError) as file:
        torch.save(content, cast(BinaryIO, file))


def load_checkpoint(folder: Path, model: nn.Module, optimisers: Optimisers) -> LoopState:
    """Restore model and optimisers; a fresh state if `folder` holds no checkpoint.

    Only tensors and plain values are read (`weights_only`): the file can run no code.

    Raises:
        ConfigError: the file is damaged, or of another model.
    """
    if not (folder / CHECKPOINT).exists():
        return LoopState()
    with _read(folder / CHECKPOINT, "is no checkpoint of this model") as content:
        _restore(model, content["model"])
        is_finished = content.get("is_finished", False)
        if not is_finished:
            optimisers.load_state_dict(content["optimisers"])
        return LoopState(
            content["step"],
            content["tokens"],
            content["seconds"],
            list(content["losses"]),
            [(int(step), float(score)) for step, score in content.get("scores", [])],
            content.get("planned", 0),
            content.get("first_loss", 0.0),
            is_finished,
        )


class Weights:
    """A Transformers model with the interface that fingerprints are computed by."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.name = str(model.name_or_path)
        self.num_parameters = model.num_parameters()
        self.vocab_size = len(model.get_input_embeddings().weight)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        return self._rows(self._model.get_input_embeddings(), token_ids)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        return self._rows(self._model.get_output_embeddings(), token_ids)

    def _rows(self, module: Any, token_ids: Tensor) -> Tensor:
        weight: Tensor = module.weight.detach()
        return weight[token_ids.to(weight.device)].float()


def pinned(folder: Path) -> Fields:
    """Return the options that a run has written into `folder`; none without one. Raises ConfigError if damaged."""
    path = folder / FILE_NAME
    return Fields.read(path, ConfigError, remedy=_OTHER) if path.exists() else Fields.of({}, str(path), ConfigError)


def run_type(folder: Path, name: str, where: torch.device, console: Console) -> torch.dtype:
    """Return the number format of products, and print it with the reason.

    name: of the format; "auto" is the one that the run in `folder` began with, for a new run what the device is quick
        at.
    """
    former = pinned(folder).string(DTYPE, AUTO, FORMATS)
    chosen = product_type(former if name == AUTO else name, where)
    usual = product_type(AUTO, where)
    if name != AUTO:
        why = "as asked for"
    elif former == AUTO:
        why = why_auto(chosen, where)
    else:
        why = "as the run began"
        if chosen != usual:
            why += f"; here it would be {dtype_name(usual)} ({why_auto(usual, where)}), by --force from the beginning"
    console.print(f"products in {dtype_name(chosen)}: {why}", highlight=False, soft_wrap=True)
    return chosen


def pin(folder: Path, options: dict[str, Any], later: Collection[str] = ()) -> None:
    """Write `options` into `folder`, or compare them with those a former run wrote there.

    later: keys that the file may lack, as an earlier version began the run, which are added; or `options`, as they are
        not known yet.

    Raises:
        ConfigError: the file is damaged, or some differ.
    """
    path = folder / FILE_NAME
    plain = json.loads(json.dumps(options))
    if not path.exists():
        write_json(path, plain, error=ConfigError)
        return
    found = pinned(folder).values
    former = {**{key: plain[key] for key in later if key in plain}, **found}
    given = {**{key: found[key] for key in later if key in found}, **plain}
    changed = sorted(key for key in {*given, *former} if given.get(key) != former.get(key))
    if changed:
        described = ", ".join(f"{key} was {str(former.get(key))[:80]} and is {given.get(key)}" for key in changed)
        raise ConfigError(f"{folder} belongs to another run: {described}. Give the same options, or another OUT.")
    if former != found:
        write_json(path, former, error=ConfigError)


def pinned_weights(folder: Path, key: str, found: str, refusal: str) -> str:
    """Return the fingerprint of weights that a run in `folder` has pinned, which these are in whatever number format;
    their own without one.

    Args:
        found: their fingerprint. refusal: what is said where they are others.

    Raises:
        ConfigError: they are others, or the file is damaged.
    """
    former = pinned(folder).string(key, found)
    if not same_target(former, found):
        raise ConfigError(f"{refusal} Give those, another OUT, or --force to begin anew.")
    return former


@contextmanager
def run_in(work: Path, out: Path, console: Console, *, resume: bool, force: bool) -> Iterator[None]:
    """Check and lock the folder of a run for this block, and print how to resume after Ctrl-C.

    Args:
        work: the run's folder, for checkpoints and samples.
        out: the model folder that will be written.
        resume: continue the run in `work`.
        force: begin anew, and replace the model in `out`.

    Raises:
        ConfigError: something is there that would be lost; nothing is there to resume; another process has the folder;
            a file cannot be read or written.
    """
    with locked(work, ConfigError, wait=False, remedy="Wait until that run ends, or give another OUT."):
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
        for left in _files(work, ".{}.*.tmp"):  # of a process that was killed while it wrote
            remove(left)
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


def _files(work: Path, form: str = "{}") -> list[Path]:
    """List the files that a run has left in its folder. form: of their names, with a place for each file's own."""
    return [path for stage in _STAGES for pattern in _FILES for path in (work / stage).glob(form.format(pattern))]
