"""Finds the heads and draft models on this machine that belong to a target.

Looked at are the target's own checkpoint, the heads that forerun ships, the folder in which the target lies, and the
Hub's local cache. Nothing is fetched. Only headers, configurations and tokenizers are read, and the target's embedding
where a head names its target: seconds, after which what was found is kept until one of the files changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from forerun.config import BUNDLED_DRAFT, BUNDLED_MODELS, BUNDLED_TARGET, SHIPPED_HEADS
from forerun.drafters.base import TRAINING_RECORD
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import head_header, head_settings, is_head
from forerun.drafters.models.heads.config import HeadConfig
from forerun.drafters.models.heads.fingerprint import embedding_fingerprint, same_target
from forerun.drafters.models.mtp.checkpoint_format import claims_mtp, find_mtp
from forerun.drafters.parse_text import text_of
from forerun.errors import ForerunError, ModelLoadError
from forerun.models.loading.folder import CONFIG, local_path, part_paths
from forerun.models.loading.source import find_source, gguf_models
from forerun.models.loading.weights import TensorSlice
from forerun.utils import fetch as store
from forerun.utils.files import EntryFile, key_here
from forerun.utils.home import BELONGING_STEM
from forerun.utils.json_file import Fields
from forerun.utils.stores import find_stored, hub_id, hub_snapshots, siblings, stored_name
from forerun.utils.vocabulary import Vocabulary, check_same_tokens

MOST_OF_TARGET = 0.5
"""Share of the target's parameters that a draft model has at most: a larger one costs more than it can gain."""
MOST_PADDING = 0.02
"""Share by which the logits of models with one vocabulary differ in width."""
SHIPPED = "shipped with forerun"
"""Place of what needs no path."""


@dataclass(frozen=True, slots=True)
class Belonging:
    """A drafter that belongs to a target.

    Attributes:
        text: as LLM takes it.
        what: the kind of head or model, with its size.
        place: where it lies.
        predicted_speedup: over plain decoding, as its card predicts it; None: no card says.
    """

    text: str
    what: str
    place: str
    predicted_speedup: float | None = None


def _restored(state: list[dict[str, Any]]) -> list[Belonging]:
    """Raises TypeError if it is something else."""
    return [Belonging(**each) for each in state]


def _state(found: list[Belonging]) -> object:
    return [asdict(each) for each in found]


FILE = EntryFile(BELONGING_STEM, 1, "drafts that were found", _restored, _state)
_known: dict[str, list[Belonging]] = {}


def belonging(name: str | Path) -> list[Belonging]:
    """Return what belongs to a target: by predicted speed-up, then heads before models, and small models first.

    Args:
        name: of the target. Of a hub id that is not in the cache, nothing is known.

    Raises:
        ModelLoadError, UnsupportedModelError: the target cannot be read.
    """
    path = _path(str(name))
    if path is None:
        if "/" not in str(name):
            find_source(name)  # which says what is wrong with it
        return []
    candidates = list(_candidates(path, is_alone=str(name) in BUNDLED_MODELS))
    parts = (part for place, folder in candidates for part in (place, *_files(folder)))
    key = key_here((str(name), *_files(path), *parts))
    ranked = _known.get(key)
    if ranked is None:
        ranked = FILE.read().get(key)
    if ranked is None:
        ranked = _ranked(path, candidates)
        FILE.put(key, ranked)
    _known[key] = ranked
    is_bundled = str(name) == BUNDLED_TARGET
    own = [Belonging("draft-model", f"the model {BUNDLED_DRAFT}", SHIPPED)] if is_bundled else []
    return [*own, *ranked]


def _files(path: Path) -> list[str]:
    """Return the files of a model or head, with what changes when one of them does."""
    found = []
    with suppress(OSError):
        for each in sorted(path.iterdir()) if path.is_dir() else part_paths(path):
            state = each.stat()
            found.append(f"{each} {state.st_size} {state.st_mtime_ns}")
    return found


def _ranked(path: Path, candidates: Iterable[tuple[str, Path]]) -> list[Belonging]:
    """Return what belongs to the target that lies there, the best first. candidates: places, and what lies in them."""
    target = _Target(path)
    found: list[tuple[float, int, Belonging]] = []
    for place, folder in candidates:
        with suppress(ForerunError, OSError):  # what cannot be read belongs to nobody
            if not folder.samefile(path) and (each := _fitting(folder, place, target)) is not None:
                found.append((-(each[0].predicted_speedup or 0), each[1], each[0]))
    found += [(0, -1, each) for each in _carried(path)]
    return [each for _, _, each in sorted(found, key=lambda each: each[:2])]


def _carried(path: Path) -> list[Belonging]:
    """Return the MTP layer that a target's checkpoint carries, if it can be served."""
    with suppress(ForerunError, OSError):
        if path.is_dir() and claims_mtp(find_source(path).plain_config()):  # GGUF's are not mapped
            size = sum(prod(shape) for shape in find_mtp(path).config.tensors().values())
            return [Belonging("mtp", f"MTP layer, {_millions(size)}", "in its checkpoint")]
    return []


class _Target:
    """A model's facts that are compared."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = find_source(path)
        self.config: Any = self.source.plain_config()

    @cached_property
    def tensors(self) -> Mapping[str, TensorSlice]:
        """Return its tensors by name, not read yet."""
        return self.source.checkpoint(self.config, torch.float32).slices

    @cached_property
    def num_parameters(self) -> int:
        """Return the entries of all its tensors."""
        return sum(prod(each.get_shape()) for each in self.tensors.values())

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return its tokens."""
        tokenizer = self.source.tokenizer() if self.source.has_tokenizer() else None
        return Vocabulary(self.source.name, self.config.vocab_size, tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of its embedding. Raises ModelLoadError: it has none of that shape."""
        shape = [self.config.vocab_size, self.config.hidden_size]
        for name, tensor in self.tensors.items():
            if list(tensor.get_shape()) == shape and "lm_head" not in name:
                return embedding_fingerprint(tensor[...].__getitem__, *shape)
        raise ModelLoadError(f"{self.source.name} has no embedding of {shape}.")


def _path(name: str) -> Path | None:
    """Return where a target lies on this machine; None if it does not."""
    if name in BUNDLED_MODELS or name in store.fetchable_names():
        return BUNDLED_MODELS[name] if name in BUNDLED_MODELS else store.path_of(name)
    path = local_path(name)
    if path.exists():
        return path
    if (stored := find_stored(name)) is not None:
        return stored
    owner_and_name, _, file = name.partition(":")
    snapshot = next(hub_snapshots(owner_and_name.replace("/", "--")), None)
    return snapshot and snapshot / file


def _candidates(path: Path, *, is_alone: bool) -> Iterator[tuple[str, Path]]:
    """Return places and folders or GGUF files to look at. is_alone: what lies beside the target is not looked at."""
    for folder in sorted(SHIPPED_HEADS.glob("*/*")):
        yield SHIPPED, folder
    if not is_alone:
        near = _models_in(path.absolute().parent, are_folders=True)
        yield from (("beside the target", each) for each in near)
        yield from ((f"{each.name} of {each.place}", each.path) for each in siblings(path) if each.path not in near)
    for folder in hub_snapshots():
        for each in (folder, *_models_in(folder)):
            yield f"{hub_id(folder)} in the Hub's cache", each


def _models_in(folder: Path, *, are_folders: bool = False) -> list[Path]:
    """Return the GGUF models in a folder, with the folders of models too where these are wanted; what cannot be read is
    none."""
    found: list[Path] = []
    with suppress(OSError):
        for each in folder.iterdir():
            with suppress(OSError):
                found += [each] if are_folders and (each / CONFIG).is_file() else gguf_models([each])
    return sorted(set(found))  # each part of a model names its first


def _fitting(path: Path, place: str, target: _Target) -> tuple[Belonging, int] | None:
    """Return the head or model with its rank, the parameters of a model; None if it does not belong to the target.

    Raises:
        ForerunError: it cannot be read, or has other tokens.
    """
    if path.is_dir() and is_head(path):
        return _head(path, place, target)
    if not path.is_dir() and not target.path.is_dir() and _nbytes(path) > _nbytes(target.path):
        return None  # before its header is read, which takes half a second
    draft = _Target(path)
    padding = abs(draft.config.vocab_size - target.config.vocab_size) / target.config.vocab_size
    if padding > MOST_PADDING or draft.num_parameters > MOST_OF_TARGET * target.num_parameters:
        return None  # before tokenizers are read, which takes long
    if draft.config.model_type != target.config.model_type and target.vocabulary.tokenizer is None:
        return None  # ids alone say nothing of another family
    texts = target.source.token_texts()
    if texts is None or texts != draft.source.token_texts():  # or both tokenizers are made, in seconds
        check_same_tokens(target.vocabulary, draft.vocabulary)
    kind = "model" if draft.source.mask_token(draft.config) is None else "parallel draft model"
    what = f"{draft.config.model_type} {kind}, {_millions(draft.num_parameters)}"
    return Belonging(stored_name(path), what, place), draft.num_parameters


def _nbytes(path: Path) -> int:
    return sum(part.stat().st_size for part in part_paths(path))


def _head(folder: Path, place: str, target: _Target) -> tuple[Belonging, int] | None:
    """Return a head that is of the target's size and, where it names its target, of its weights; else None."""
    config = head_header(folder, target.config.num_hidden_layers).config
    if (config.vocab_size, config.target_hidden_size) != (target.config.vocab_size, target.config.hidden_size):
        return None
    named = head_settings(folder).fields("target", None)
    if named is not None and not same_target(named.string("fingerprint", ""), target.fingerprint):
        return None
    name = _drafter_of(config)
    text = name if place == SHIPPED else text_of(name, {"model": folder})
    size = sum(prod(shape) for shape in config.tensors().values())
    return Belonging(text, f"{config.kind} head, {_millions(size)}", place, _predicted(folder)), 0


def _millions(count: int) -> str:
    return f"{count / 1e6:,.3g} M parameters" if count < 1e9 else f"{count / 1e9:.3g} B parameters"


def _drafter_of(config: HeadConfig) -> str:
    if isinstance(config, EagleConfig):
        return "mtp" if config.is_mtp else "eagle"
    return "block" if isinstance(config, BlockConfig) else "medusa"


def _predicted(folder: Path) -> float | None:
    """Return the largest speed-up that the card of a head predicts; None without a card."""
    with suppress(ForerunError):
        card = Fields.read(folder / TRAINING_RECORD, ModelLoadError).fields("held_out").fields("predicted_speedup")
        return max(map(card.number, card.values), default=None)
    return None
