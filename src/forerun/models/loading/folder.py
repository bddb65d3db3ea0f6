"""A model's folder before Transformers reads it: its location, its JSON files, and the files of its weights; and the
paths of GGUF files.

The folder of a hub id is the hub's cache. Only JSON, tokenizers, templates and safetensors are fetched: no code and no
pickles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from forerun.config import BUNDLED_MODELS
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.utils import fetch as store
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields, open_regular
from forerun.utils.stores import stored_models

GGUF_SUFFIX = ".gguf"
GGUF_MAGIC = b"GGUF"
_GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_REMEDY = "Check its name and the network."
_SUBFOLDERS = ("[!a]*/*", "a/*", "a[!d]*/*", "*/*/*")
"""Patterns cannot make an exception: all subfolders but those that begin as additional_chat_templates does."""


def download_files(name: str, patterns: Sequence[str]) -> Path:
    """Fetch these files of a hub id, and return their cached folder; of subfolders, named chat templates alone.

    Raises:
        ModelLoadError: there is no such id, or it can neither be reached nor found in the cache.
    """
    from huggingface_hub import snapshot_download

    names = (*BUNDLED_MODELS, *store.fetchable_names())
    what = f"{name} is neither a folder nor one of {', '.join(names)}, and cannot be fetched as a hub id"
    near = get_close_matches(name, (*names, *(each.name for each in stored_models())), 1)
    with as_load_errors(what, f"Did you mean {near[0]}?" if near else _REMEDY):
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(_SUBFOLDERS)))


def download_file(name: str, file: str) -> Path:
    """Fetch one file of a hub id into the cache, and return its path.

    Raises:
        ModelLoadError: as `download_files`.
    """
    from huggingface_hub import hf_hub_download

    with as_load_errors(f"{file} cannot be fetched from the hub id {name}", _REMEDY):
        return Path(hf_hub_download(name, file))


def cached_folder(name: str) -> Path | None:
    """Return the folder of a hub id in the cache, whatever part of it is there; None if nothing is. No network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # nothing is there, or it is no hub id
        return None


CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TEKKEN = "tekken.json"
_MISTRAL_CONFIG = "params.json"
_MISTRAL_WEIGHTS = "consolidated*.safetensors"
_TOKENIZER_JSON = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
_SENTENCE_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TOKENIZERS = (TOKENIZER, TOKENIZER_CONFIG, TEKKEN, "vocab.json", "vocab.txt", *_SENTENCE_PIECES)
_TEXT = ("*.json", "*.jinja", "*.txt", "*.model")


def local_path(name: str | Path) -> Path:
    """Return the path of a name, with "~" expanded. Raises ModelLoadError if "~NAME" names no user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ModelLoadError(f"{name} begins with the home of a user who is not there. Give the whole path.") from None


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder on this machine.

    Attributes:
        name: the name that the user gave, for messages.
        path: where it is.
        is_remote: whether it is the hub's cache of a hub id.
    """

    name: str
    path: Path
    is_remote: bool = False

    @classmethod
    def find(cls, name: str | Path) -> ModelFolder:
        """Return the folder of a bundled model, a local folder, or, for a string, that of a hub id.

        Raises:
            ModelLoadError: there is none, or something in it is neither a file nor a folder.
        """
        text = str(BUNDLED_MODELS.get(str(name), name))
        path = local_path(text)
        if path.is_dir():
            for each in path.iterdir():
                if each.exists() and not (each.is_file() or each.is_dir()):  # reading a pipe waits for its other end
                    raise ModelLoadError(f"{each}: it is a pipe or a device. Put a file there, or take it away.")
            return cls(str(name), path)
        if isinstance(name, Path) or path.is_absolute() or text.startswith((".", "~")) or path.exists():
            what = "is neither a folder nor a GGUF file" if path.exists() else "does not exist"
            raise ModelLoadError(
                f"model folder {name} {what}. Give a folder with config.json, a .gguf file, or a hub id."
            )
        return cls(str(name), download_files(text, _TEXT), is_remote=True)

    def has_tokenizer(self) -> bool:
        """Return whether the folder has any file of a tokenizer."""
        return any((self.path / file).exists() for file in _TOKENIZERS)

    def sentence_piece(self) -> Path | None:
        """Return the SentencePiece model that is the only tokenizer of the folder; None if there is another one.

        Files of tiktoken have such names too; they are lines of text, and a SentencePiece model begins with the tag of
        its first piece, a line feed.
        """
        if any((self.path / file).exists() for file in (TOKENIZER, TEKKEN)):
            return None
        models = [path for file in _SENTENCE_PIECES if (path := self.path / file).is_file()]
        return next((path for path in models if path.read_bytes().startswith(b"\n")), None)

    def recommended_sampling(self) -> dict[str, float]:
        """Return the sampling options of its generation configuration, as `ModelSource.recommended_sampling`."""
        fields = self.read(GENERATION_CONFIG)
        neutral = {"repetition_penalty": 1.0}
        if fields.flag("do_sample", False):
            neutral |= {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0.0}
        found = {key: fields.number(key, value) for key, value in neutral.items()}
        return {key: value for key, value in found.items() if value != neutral[key]}

    def read(self, file: str) -> Fields:
        """Read a JSON file; returns empty fields if the folder has no such file.

        Raises:
            ModelLoadError: it is damaged, or holds no object.
        """
        path = self.path / file
        if path.exists():
            return Fields.read(path, ModelLoadError, remedy=REMEDY)
        return Fields(str(path), {}, ModelLoadError, REMEDY)

    def config(self) -> Fields:
        """Read config.json.

        Raises:
            ModelLoadError: there is none, or as `read`.
        """
        if not (self.path / CONFIG).is_file():
            self._refuse_mistral_layout(_MISTRAL_CONFIG, _MISTRAL_WEIGHTS)
            other = f", or one of its GGUF files: {self.name}:FILE.gguf" if self.is_remote else ""
            raise ModelLoadError(
                f"model folder {self.name} has no config.json. Give a Transformers model folder{other}."
            )
        return self.read(CONFIG)

    def tokenizer_config(self) -> Fields:
        """Read tokenizer_config.json; the other JSON files of the tokenizer are checked too.

        Raises:
            ModelLoadError: as `read`.
        """
        for file in _TOKENIZER_JSON:
            self.read(file)
        return self.read(TOKENIZER_CONFIG)

    def weight_files(self) -> list[Path]:
        """Return the safetensors files of the weights, fetched if they lie on the hub.

        Raises:
            ModelLoadError: there are none, or the index that names them is damaged.
        """
        if self.is_remote:
            names = self._shards() if (self.path / INDEX).is_file() else [WEIGHTS]
            download_files(self.name, names)
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if not (self.path / INDEX).is_file():
            raise self._no_weights()
        shards = self._shards()
        for shard in shards:
            if not (self.path / shard).is_file():
                raise ModelLoadError(f"{self.path / INDEX}: it names {shard}, which is not there. {REMEDY}")
        return [self.path / shard for shard in shards]

    def _shards(self) -> list[str]:
        """Return the files that the index names, each once."""
        weight_map: Fields = self.read(INDEX).fields("weight_map")
        shards = list(dict.fromkeys(weight_map.string(tensor) for tensor in weight_map.values))
        for shard in shards:
            if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise ModelLoadError(
                    f"{self.path / INDEX}: it names {shard[:60]!r}, but may name *.safetensors files beside it only. "
                    f"{REMEDY}"
                )
        if not shards:
            raise ModelLoadError(f"{self.path / INDEX}: its weight_map is empty. {REMEDY}")
        return shards

    def _no_weights(self) -> ModelLoadError:
        others = sorted(path.name for path in self.path.glob("*.safetensors"))
        odd = next((name for name in others if not (self.path / name).is_file()), None)
        if odd is not None:
            return ModelLoadError(f"{self.path / odd}: it is not a regular file. {REMEDY}")
        self._refuse_mistral_layout(_MISTRAL_WEIGHTS)
        if others:
            return ModelLoadError(
                f"model folder {self.name} has {others[0]}, but no {WEIGHTS}, and no {INDEX} that names it. {REMEDY}"
            )
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(pattern)]
        if pickles:
            return ModelLoadError(
                f"model folder {self.name} has only pickled weights ({pickles[0]}), which can run code when loaded. "
                "Convert it: model.save_pretrained(folder) of a current Transformers writes safetensors."
            )
        return ModelLoadError(f"model folder {self.name} has no *.safetensors weights. {REMEDY}")

    def _refuse_mistral_layout(self, *patterns: str) -> None:
        """Raise UnsupportedModelError if there are files of Mistral's own layout."""
        files = [path.name for pattern in patterns for path in sorted(self.path.glob(pattern))]
        if files:
            raise UnsupportedModelError(
                f"model folder {self.name} is in Mistral's own layout ({files[0]}), whose names of tensors are not "
                "Transformers'. Most of Mistral's repositories hold config.json and model*.safetensors too: download "
                "these, or take a GGUF file of the model."
            )


def is_gguf(path: Path) -> bool:
    """Return whether a path is called a GGUF file, or is a file that begins as one: those in a store of blobs have no
    extension."""
    if path.suffix.lower() == GGUF_SUFFIX:
        return not path.is_dir()
    with suppress(OSError, ValueError), open_regular(path) as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    return False  # a folder, nothing, a pipe, or no path


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a model, the first one first, whether they exist or not: those that the name of
    one, NAME-00002-of-00003.gguf, speaks of; for any other name, the path."""
    named = _GGUF_PART.search(path.name)
    if named is None or not 1 <= int(named[1]) <= int(named[2]):
        return [path]
    stem = path.name[: named.start()]
    count = named[2]
    suffix = path.suffix
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]
