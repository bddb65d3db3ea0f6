"""The command line that made a model, as its card gives it: every option that differs from its default."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.train.defaults import (
    DRAFT_ARCHITECTURE,
    OTHER_VOCAB_ARCHITECTURE,
    Architecture,
    DraftTraining,
    LmTraining,
    OtherVocabTraining,
)


def lm_command(data: Path | None, options: LmTraining, tokenizer: Path | None) -> str:
    """`forerun train lm` with what was chosen."""
    return (
        f"forerun train lm OUT --tokens {options.tokens} --seed {options.seed}"
        + _lm_flags(options, LmTraining())
        + (" --tokenizer TOKENIZER" if tokenizer is not None else "")
        + _flags(data, options.architecture, Architecture())
    )


def draft_command(data: Path | None, options: DraftTraining, start: Path | None) -> str:
    """`forerun train draft` with what was chosen."""
    pruning = options.pruning
    is_trained = start is not None or pruning.layers is not None
    first = "--start DRAFT" if start is not None else f"--text-tokens {options.text.tokens}"
    if pruning.layers is not None:
        width = "" if pruning.width is None else f" --prune-width {pruning.width} --prune-by {pruning.by}"
        first = f"--prune-layers {pruning.layers}{width}"
    sizes = "" if is_trained else _flags(None, options.text.architecture, DRAFT_ARCHITECTURE)
    text = "" if is_trained else _lm_flags(options.text, DraftTraining().text, ("copy_share", "rename_share"))
    return (
        f"forerun train draft OUT --target TARGET {first} --sample-tokens {options.sample_tokens} "
        f"--text-law-tokens {options.text_law_tokens} --tokens {options.tokens} --seed {options.seed}"
        + _changed(options, DraftTraining(), ("tokens_per_step", "sample_batch", "new_tokens", "own_prompt_share"))
        + _changed(options, DraftTraining(), ("loss", "output_tokens"))
        + text
        + _flags(data, Architecture(), Architecture())
        + sizes
    )


def other_vocab_command(data: Path | None, options: OtherVocabTraining, samples: Path | None) -> str:
    """`forerun train other-vocab` with what was chosen."""
    drawn = _changed(options.sampling, DraftTraining(), ("sample_tokens", "sample_batch", "own_prompt_share"))
    return (
        f"forerun train other-vocab OUT --target TARGET{' --samples SAMPLES' if samples is not None else drawn} "
        f"--tokens {options.text.tokens} --seed {options.text.seed}"
        + _changed(options, OtherVocabTraining(), ("read_tokens",))
        + _lm_flags(options.text, OtherVocabTraining().text)
        + _flags(data, options.text.architecture, OTHER_VOCAB_ARCHITECTURE, ("vocab_size", *_SIZES))
    )


_SIZES = tuple(name for name in asdict(Architecture()) if name != "vocab_size")
_LM_FLAGS = ("tokens_per_step", "short_window", "long_share", "copy_share", "rename_share")


def _lm_flags(options: LmTraining, default: LmTraining, names: tuple[str, ...] = _LM_FLAGS) -> str:
    optimisation = _changed(options.optimisation, default.optimisation, ("weight_decay",)) if names == _LM_FLAGS else ""
    return _changed(options, default, names) + optimisation


def _changed(options: Any, default: Any, names: tuple[str, ...]) -> str:
    """The flags of the options that are not the default's."""
    return "".join(
        f" --{name.replace('_', '-')} {getattr(options, name)}"
        for name in names
        if getattr(options, name) != getattr(default, name)
    )


def _flags(data: Path | None, sizes: Architecture, default: Architecture, names: tuple[str, ...] = _SIZES) -> str:
    """The flags for a folder of files and for sizes that are not the default's."""
    flags = f" --data {data.name}" if data is not None else ""
    return flags + _changed(sizes, default, names)
