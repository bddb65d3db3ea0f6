"""The folder of a PEFT adapter, before PEFT sees it: what its settings say, and its tensors.

Settings that would change more than the weights of linear layers and embeddings are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.files.foreign_errors import as_load_errors
from forerun.files.json_file import Fields

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
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector(?:\.weight)?)"
)
_WHOLE = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.base_layer)?\.weight")


def read_settings(fields: Fields) -> dict[str, Any]:
    """What decides the merged weights, as LoraConfig takes it.

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
    begun = fields.values.get("init_lora_weights")
    if not any(begun is way or begun == way for way in _KEEPS_BASE):
        raise UnsupportedModelError(
            f"{fields.place}: init_lora_weights is {str(begun)[:60]!r}, for which the base model's weights were "
            "changed as well. Convert it to plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)."
        )
    for key, value in fields.values.items():
        if value and key not in _ELSEWHERE:
            raise UnsupportedModelError(f"{fields.place}: the adapter has {key[:60]}, which is not merged. {MERGED}")
    settings: dict[str, Any] = {"r": fields.integer("r", low=1, high=_MAX_RANK)}
    settings["lora_alpha"] = fields.number("lora_alpha")
    for key in _FLAGS:
        settings[key] = fields.flag(key, False)
    for key in _PATTERNS:
        settings[key] = _pattern(fields, key)
    return settings


def _pattern(fields: Fields, key: str) -> dict[str, float]:
    """Numbers by module. PEFT reads the names as regular expressions: those of plain names are taken."""
    pattern: Fields | None = fields.fields(key, None)
    if pattern is None:
        return {}
    odd = next((name for name in pattern.values if not _PATTERN.fullmatch(name)), None)
    if odd is not None:
        raise fields.wrong(key, f"by names of modules, and {odd[:60]!r} is none")
    if key == "rank_pattern":
        return {name: pattern.integer(name, low=1, high=_MAX_RANK) for name in pattern.values}
    return {name: pattern.number(name) for name in pattern.values}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors by name. Raises ModelLoadError where there are none in safetensors."""
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
    """What each tensor is.

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
        raise ModelLoadError(f"{path / WEIGHTS}: it holds no LoRA matrices. {REMEDY}")
    return Tensors(matrices, parts, whole)


def check_targets(fields: Fields, parts: Mapping[str, object]) -> None:
    """Every module that the settings name has tensors; PEFT's expressions ("all-linear") are not looked at."""
    if not isinstance(fields.values.get("target_modules"), list):
        return
    for target in fields.list_of("target_modules", str):
        if not any(module == target or module.endswith(f".{target}") for module in parts):
            raise ModelLoadError(
                f"{fields.place}: target_modules names {target[:60]!r}, for which {WEIGHTS} has no tensors. {REMEDY}"
            )
