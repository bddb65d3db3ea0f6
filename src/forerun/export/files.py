"""Helpers of all exports: checks of output path and disk space, generation configuration, tokenizer, folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from forerun.errors import ConfigError, IncompatibleDrafterError, ModelLoadError
from forerun.models import find_tokenizer
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.models.loading.source import find_source
from forerun.utils.files import REMEDY, new_files, refuse_to_overwrite, whole_folder, write_json
from forerun.utils.json_file import read_json
from forerun.utils.vocabulary import Vocabulary, check_same_tokens

MAX_SHARD_BYTES = 5_000_000_000
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MARGIN = 64 << 20
"""Bytes reserved for the files beside the weights."""
_OF_A_MODEL = (
    *("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer.json", _TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja*"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files of a previous model, which would be read along with the new one's."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The size of an export.

    Attributes:
        num_parameters: tied ones counted once.
        dtype: of the weights, such as "float32".
        nbytes: of all files.
        files: their names, sorted.
    """

    num_parameters: int
    dtype: str
    nbytes: int
    files: tuple[str, ...]


def check_output(out: Path, force: bool = False) -> None:
    """Raise ConfigError if an output path cannot be written, or exists and `force` is not set."""
    if not force:
        refuse_to_overwrite(out, ConfigError)
    parent = _existing(out)
    if not parent.is_dir():
        raise ConfigError(f"{out} cannot be written: {parent} is not a folder. {REMEDY}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be written: {parent} is read-only. {REMEDY}")


def check_disk_space(out: Path, nbytes: int) -> None:
    """Raise ConfigError if the disk has too little space for new files beside the previous ones."""
    free = shutil.disk_usage(_existing(out)).free
    needed = nbytes + _MARGIN
    if free < needed:
        raise ConfigError(f"{out} needs {needed / 1e9:,.1f} GB, and its disk has {free / 1e9:,.1f} GB left. {REMEDY}")


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def generation_config(eos_token_ids: Iterable[int], tokenizer: Any, sampling: Mapping[str, float]) -> Any:
    """Make a generation configuration of end tokens, bos and padding, and recommended sampling options."""
    from transformers import GenerationConfig

    ids = {role: getattr(tokenizer, role, None) for role in ("bos_token_id", "pad_token_id")}
    options = {option: int(value) if option == "top_k" else value for option, value in sampling.items()}
    drawn = bool(sampling.keys() - {"repetition_penalty"})
    return GenerationConfig(eos_token_id=sorted(eos_token_ids) or None, do_sample=drawn or None, **ids, **options)


def save_tokenizer(tokenizer: Any, folder: Path, max_length: int) -> None:
    """Write the tokenizer, its template inside tokenizer_config.json, where every version of Transformers looks."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / _TOKENIZER_CONFIG
    settings = read_json(path, ModelLoadError)
    settings["model_max_length"] = min(settings.get("model_max_length", max_length), max_length)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # its name before Transformers 5, which reads both
    write_json(path, settings, error=ConfigError)


@contextmanager
def model_folder(out: Path) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yield a temporary folder, whose files move to `out` at the end, and a dict that receives their sizes by name.

    A new `out` appears whole or not at all. In an existing one files are replaced one by one at the end, and the other
    files of a previous model are removed.

    Raises:
        ConfigError: the files cannot be written.
    """
    sizes: dict[str, int] = {}
    with (new_files if out.is_dir() else whole_folder)(out, ConfigError) as fresh:
        try:
            yield fresh, sizes
        except SafetensorError as error:  # a full disk
            raise ConfigError(f"{out} cannot be written: {error}. {REMEDY}") from error
        for path in fresh.glob("*.safetensors"):
            path.chmod((fresh / "config.json").stat().st_mode)  # safetensors makes them readable for the user alone
        sizes |= {path.name: path.stat().st_size for path in fresh.iterdir()}
    _remove_previous(out, sizes)


def _remove_previous(out: Path, written: Collection[str]) -> None:
    """Remove the files of a previous model that were not replaced: they would be read along with the new ones."""
    for pattern in _OF_A_MODEL:
        for path in out.glob(pattern):
            if path.name not in written and not path.is_dir():
                try:
                    path.unlink()
                except OSError as failure:
                    raise ConfigError(
                        f"{path}, of the previous model, cannot be removed: {failure.strerror}. Remove it by hand: it "
                        "would be read along with the new model's files."
                    ) from failure


DRAFT_TOKENS = 3
"""Default K in the commands for other programs."""


def check_draft(draft: str | Path, target: str | Path, reader: str) -> tuple[Vocabulary, Vocabulary]:
    """Return the vocabularies of draft and target after checking that they have the same tokens.

    Args:
        reader: the program that will use the draft, for messages.

    Raises:
        IncompatibleDrafterError: they differ, or the draft proposes only a part of its vocabulary.
        ModelLoadError: one of them cannot be read.
    """
    ours = _vocabulary(draft)
    theirs = _vocabulary(target)
    source = find_source(draft)
    tokens = source.output_tokens(source.config())
    if tokens is not None:
        raise IncompatibleDrafterError(
            f"{draft} proposes {len(tokens):,} of {ours.size:,} tokens ({OUTPUT_TOKENS} in its configuration): the "
            f"other rows of its output layer were not trained, and {reader} computes all of them. Train a draft "
            "without the key output_tokens, or draft with this one in forerun."
        )
    check_same_tokens(theirs, ours)
    return ours, theirs


def _vocabulary(name: str | Path) -> Vocabulary:
    return Vocabulary(str(name), find_source(name).config().vocab_size, find_tokenizer(name))
