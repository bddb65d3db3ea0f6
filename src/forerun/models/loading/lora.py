"""PEFT's LoRA adapters (Hu et al., 2106.09685): read, compared with their model, and merged into it.

The folder is read here: its settings as JSON, its tensors from safetensors. PEFT is given values alone, so it opens no
file, looks up no base model, and imports nothing that a setting names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.models.loading.folder import ModelFolder, local_path
from forerun.models.loading.folder_source import FolderSource, text_name, text_names
from forerun.models.loading.transformers_modules import round_parameters
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.foreign_errors import as_load_errors
from forerun.utils.json_file import Fields
from forerun.utils.vocabulary import first_difference, token_text, tokens_by_id

# Settings that would change more than the weights of linear layers and embeddings are refused by name.

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
REMEDY = "Save the adapter anew with PEFT's save_pretrained."
MERGED = "Merge it where it was trained (merge_and_unload), save the whole model, and serve that."

_FLAGS = ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")
_PATTERNS = ("rank_pattern", "alpha_pattern")
_ELSEWHERE = {
    *("peft_type", "task_type", "bias", "init_lora_weights", "target_modules", "r", "lora_alpha", *_FLAGS, *_PATTERNS),
    # what says nothing of the merged weights
    *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "runtime_config"),
    *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
}
"""Settings that are looked at by name or not needed; any other one is refused if it is set."""
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin an adapter that leave the base model's weights as they were."""
_PATTERN = re.compile(r"[\w.^$]+")
_MAX_RANK = 2**16
_BASE = "base_model.model."
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector(?:\.weight)?)"
)
_WHOLE = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.base_layer)?\.weight")


def read_settings(fields: Fields) -> dict[str, Any]:
    """Return the settings that decide the merged weights, in the form of LoraConfig.

    Raises:
        ModelLoadError: a setting is damaged.
        UnsupportedModelError: it is no LoRA adapter of a language model, or one that changes more than LoRA's matrices.
    """
    kind = fields.string("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{fields.place}: it is a {kind[:60]} adapter, and only LORA is merged. {MERGED}")
    task = fields.string("task_type", "CAUSAL_LM")
    if task != "CAUSAL_LM":
        raise UnsupportedModelError(
            f"{fields.place}: the adapter is for the task {task[:60]}, not CAUSAL_LM. Give one of a language model."
        )
    if fields.string("bias", "none") != "none":
        raise UnsupportedModelError(f"{fields.place}: the adapter replaces biases of the model. {MERGED}")
    initialisation = fields.values.get("init_lora_weights")
    if not any(initialisation is way or initialisation == way for way in _KEEPS_BASE):
        raise UnsupportedModelError(
            f"{fields.place}: init_lora_weights is {str(initialisation)[:60]!r}, for which the base model's weights "
            "were changed as well. Convert it to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)."
        )
    for key, value in fields.values.items():
        if value and key not in _ELSEWHERE:
            raise UnsupportedModelError(f"{fields.place}: the adapter has {key[:60]}, which is not merged. {MERGED}")
    return {
        "r": fields.integer("r", low=1, high=_MAX_RANK),
        "lora_alpha": fields.number("lora_alpha"),
        **{key: fields.flag(key, False) for key in _FLAGS},
        **{key: _pattern(fields, key) for key in _PATTERNS},
    }


def _pattern(fields: Fields, key: str) -> dict[str, float]:
    """Return numbers by module. PEFT reads the names as regular expressions; only plain names are accepted."""
    pattern: Fields | None = fields.fields(key, None)
    if pattern is None:
        return {}
    odd = next((name for name in pattern.values if not _PATTERN.fullmatch(name)), None)
    if odd is not None:
        raise fields.wrong(key, f"by names of modules, and {odd[:60]!r} is none")
    if key == "rank_pattern":
        return {_of_text(name): pattern.integer(name, low=1, high=_MAX_RANK) for name in pattern.values}
    return {_of_text(name): pattern.number(name) for name in pattern.values}


def _of_text(name: str) -> str:
    """Return the name of a module in the text model of a container that an adapter was trained on."""
    return "^" * name.startswith("^") + text_name(name.lstrip("^"))


def _text_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter by names of the text model; of a container's, those of its text model.

    Raises:
        ModelLoadError: one is there by two names.
    """
    inner = {name.removeprefix(_BASE): tensor for name, tensor in tensors.items()}
    named = text_names(inner, is_container=any(text_name(name) != name for name in inner))
    found = {f"{_BASE}{own}": inner[name] for name, own in named.items()}
    if len(found) < len(named):
        raise ModelLoadError(f"{path / WEIGHTS}: it holds tensors of a text model by two names. {REMEDY}")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors by name. Raises ModelLoadError if there are none in safetensors."""
    from safetensors.torch import load_file

    if not (path / WEIGHTS).is_file():
        pickles = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth") for each in path.glob(pattern))
        if pickles:
            raise ModelLoadError(
                f"adapter {path} has only pickled weights ({pickles[0]}), which can run code when loaded. Save it anew "
                f"with a current PEFT, which writes {WEIGHTS}."
            )
        raise ModelLoadError(f"adapter {path} has no {WEIGHTS}. {REMEDY}")
    with as_load_errors(f"{path / WEIGHTS}: the weights are damaged", REMEDY):
        tensors: dict[str, Tensor] = load_file(path / WEIGHTS)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelLoadError(f"{path / WEIGHTS}: tensor {name} is stored as {tensor.dtype}. {REMEDY}")
    return tensors


class Tensors(NamedTuple):
    """The tensors of an adapter, sorted.

    Attributes:
        matrices: LoRA's, by name.
        parts: module of the model -> its matrices by their part, such as "lora_A.weight".
        whole: module -> its weight, where the file holds it: PEFT saves an embedding along with its matrices.
    """

    matrices: Mapping[str, Tensor]
    parts: Mapping[str, Mapping[str, Tensor]]
    whole: Mapping[str, Tensor]


def sorted_tensors(tensors: Mapping[str, Tensor], path: Path) -> Tensors:
    """Sort the tensors into LoRA's matrices and whole weights.

    Raises:
        UnsupportedModelError: one is neither a part of a LoRA matrix nor a weight.
        ModelLoadError: there are no matrices.
    """
    matrices: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if found := _TENSOR.fullmatch(name):
            matrices[name] = tensor
            parts.setdefault(found["module"], {})[found["part"]] = tensor
        elif found := _WHOLE.fullmatch(name):
            whole[found["module"]] = tensor
        else:
            raise UnsupportedModelError(f"{path / WEIGHTS}: tensor {name[:120]} is no part of a LoRA matrix. {MERGED}")
    if not parts:
        raise ModelLoadError(f"{path / WEIGHTS}: it holds no LoRA matrices of a language model. {REMEDY}")
    return Tensors(matrices, parts, whole)


def check_targets(fields: Fields, parts: Mapping[str, object]) -> None:
    """Check that every module named in the settings has tensors, unless some are excluded; PEFT's expressions
    ("all-linear") are not checked."""
    if not isinstance(fields.values.get("target_modules"), list) or fields.values.get("exclude_modules"):
        return
    for target in fields.list_of("target_modules", str):
        if not any(module == target or module.endswith(f".{target}") for module in parts):
            raise ModelLoadError(
                f"{fields.place}: target_modules names {target[:60]!r}, for which {WEIGHTS} has no tensors. {REMEDY}"
            )


def with_adapter(
    read: Callable[[torch.dtype], Any],
    dtype: torch.dtype,
    adapter: str | Path,
    name: str | Path,
    spec: DecoderSpec | None,
) -> Any:
    """Return the Transformers model that `read` gives in a number format, with an adapter merged.

    The sum is made in float32 (float64 for a float64 model) and rounded once, so the whole model is held in that format
    meanwhile.

    Args:
        adapter: its folder.
        name: the model's, for messages. spec: of a model that the fused decoder computes.

    Raises:
        ConfigError: PEFT is not installed.
        ModelLoadError: the adapter is damaged, or does not fit the model.
        UnsupportedModelError: it is no LoRA adapter, or one that changes more than LoRA's matrices.
    """
    found = Adapter.read(adapter)
    _peft()
    return round_parameters(found.merged(read(torch.promote_types(dtype, torch.float32)), str(name)), dtype, spec)


def adapter_tokenizer(folder: str | Path, base: Any, name: str) -> Any:
    """Return the tokenizer saved with an adapter; without one, the model's.

    Args:
        base: the model's; None if it has none. name: the model's, for messages.

    Raises:
        ModelLoadError: it cannot be read, or a token id stands for something else than in the model's.
    """
    source = FolderSource(ModelFolder(f"adapter {folder}", local_path(folder)))
    if not source.has_tokenizer():
        return base
    tokenizer = source.tokenizer()
    first = None if base is None else first_difference(tokens_by_id(base), tokens_by_id(tokenizer))
    if first is not None:
        token_id, ours, theirs = first
        raise ModelLoadError(
            f"adapter {folder}: token {token_id} of the tokenizer beside it is {token_text(theirs)}, and "
            f"{token_text(ours)} in the vocabulary of {name}. Give the model that it was trained on; if the ids that "
            "the adapter was trained with are the model's, take the tokenizer out of its folder."
        )
    return tokenizer


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in a folder.

    Attributes:
        path: the folder.
        settings: what of adapter_config.json decides the merged weights.
        tensors: its matrices, and what else its file holds.
    """

    path: Path
    settings: Mapping[str, Any]
    tensors: Tensors

    @classmethod
    def read(cls, folder: str | Path) -> Adapter:
        """Read the adapter in a local folder.

        Raises:
            ModelLoadError, UnsupportedModelError: as `with_adapter`, as far as the adapter alone shows.
        """
        path = local_path(folder)
        if not (path / CONFIG).is_file():
            raise ModelLoadError(
                f"adapter {folder}: it is no folder with {CONFIG}. Give the folder that PEFT's save_pretrained wrote; "
                "adapters are not fetched."
            )
        fields = Fields.read(path / CONFIG, ModelLoadError, remedy=REMEDY)
        settings = read_settings(fields)
        found = read_tensors(path)
        check_targets(fields, sorted_tensors(found, path).parts)
        return cls(path, settings, sorted_tensors(_text_tensors(found, path), path))

    def merged(self, model: Any, name: str) -> Any:
        """Merge the adapter into a Transformers model, and return it.

        Raises:
            ModelLoadError: a module is not there or has another shape, a tensor is missing, or a number is not finite.
        """
        self._check_modules(model, name)
        peft = _peft()
        config = peft.LoraConfig(**self.settings, target_modules=list(self.tensors.parts))
        what = f"adapter {self.path} cannot be merged into {name}"
        with as_load_errors(what, REMEDY), warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(model, config)
            loaded = peft.set_peft_model_state_dict(wrapped, dict(self.tensors.matrices))
            missing = [key for key in loaded.missing_keys if "lora_" in key]
            if missing or loaded.unexpected_keys:
                wrong = f"it lacks {missing[0]}" if missing else f"it holds {loaded.unexpected_keys[0]}"
                raise ModelLoadError(f"{what}: {wrong}. {REMEDY}")
            result = wrapped.merge_and_unload(safe_merge=True)
        result.requires_grad_(False)
        return result.eval()

    def _check_modules(self, model: Any, name: str) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        shared = _shared_weights(modules)
        for module, weight in self.tensors.whole.items():
            served = getattr(modules.get(module), "weight", None)
            if served is None or served.shape != weight.shape or not served.to(weight.dtype).equal(weight):
                raise UnsupportedModelError(
                    f"adapter {self.path}: it holds the whole weight of {module}, and {name} has another one: it was "
                    f"trained, or tokens were added. {MERGED}"
                )
        for module, parts in self.tensors.parts.items():
            found = modules.get(module)
            if not isinstance(getattr(found, "weight", None), Tensor):
                raise ModelLoadError(
                    f"adapter {self.path}: it is for a module {module}, which {name} does not have. Give the model "
                    "that the adapter was trained on."
                )
            if module in shared:
                raise UnsupportedModelError(
                    f"adapter {self.path}: it changes {module}, whose weight {name} shares with {shared[module]}: "
                    f"merged, it would change both. {MERGED}"
                )
            _check_shapes(self.path, module, parts, found, name)


def _check_shapes(path: Path, module: str, parts: Mapping[str, Tensor], found: Any, name: str) -> None:
    from transformers.pytorch_utils import Conv1D

    weight = list(found.weight.shape)
    if len(weight) != 2:
        raise ModelLoadError(f"adapter {path}: {module} of {name} is no linear layer or embedding. {REMEDY}")
    inner = isinstance(found, nn.Embedding)
    down, up = ("lora_embedding_A", "lora_embedding_B") if inner else ("lora_A.weight", "lora_B.weight")
    for part in (down, up):
        if part not in parts:
            raise ModelLoadError(f"adapter {path}: {module} has no {part}. {REMEDY}")
    first = list(parts[down].shape)
    last = list(parts[up].shape)
    size_in, size_out = weight if inner or isinstance(found, Conv1D) else weight[::-1]
    if len(first) != 2 or len(last) != 2 or first[1] != size_in or last != [size_out, first[0]]:
        raise ModelLoadError(
            f"adapter {path}: its matrices for {module} have shapes {first} and {last}, and the weight in {name} has "
            f"{weight}. Give the model that the adapter was trained on."
        )


def _shared_weights(modules: Mapping[str, Any]) -> dict[str, str]:
    """Return module -> another one with the same weight, as a tied embedding and output layer."""
    owners: dict[int, list[str]] = {}
    for path, module in modules.items():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(path)
    return {
        path: next(other for other in paths if other != path)
        for paths in owners.values()
        if len(paths) > 1
        for path in paths
    }


def _peft() -> Any:
    """Import the peft package. Raises ConfigError if it is missing."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"An adapter needs the package peft, which cannot be imported: {error}. pip install 'forerun[peft]'"
        ) from None
    return peft
