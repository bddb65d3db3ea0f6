"""Head folders, config.json and model.safetensors: forerun's own format, and reading in any format.

forerun's format can represent every head: config.json holds the fields of the configuration of its kind, the target's
fingerprint, a record of how the head was trained, and a checksum over both files; matrices are floats, or quantized to
8 bits with a scale a row. Public formats are read by `checkpoint_formats.py` and the `checkpoint_format.py` of methods.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.config import SHIPPED_HEADS
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.checkpoint_format import SPECULATORS
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.checkpoint_formats import ASSISTANT, public_config_of, read_public
from forerun.drafters.models.heads.config import FLOATS, HeadConfig, StoredHead, TensorSpec, check_loaded, checked_d2t
from forerun.drafters.models.heads.fingerprint import Fingerprint, FingerprintedTarget, same_target, target_fingerprint
from forerun.drafters.models.heads.weights_file import WEIGHTS, open_head_slices
from forerun.drafters.models.medusa.checkpoint_format import is_medusa, medusa_config_of, read_medusa
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.kernels.quantize import QuantizedWeight, quantize_int8
from forerun.utils.files import digest, new_files, whole_folder, write_bytes, write_json
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import ErrorType, Fields, open_regular

_CODES, _SCALE = ".codes", ".scale"
"""Suffixes of a quantized matrix's tensors: NAME.codes [out, in] uint8 and NAME.scale [out, 1] float32."""
_ZERO = 128


def quantize_matrices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize every matrix, with one scale a row; vectors stay numbers.

    Raises:
        ConfigError: a matrix cannot be quantized.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            found[name] = tensor
            continue
        try:
            weight = quantize_int8(tensor, f"the tensor {name}")
        except ModelLoadError as failure:
            raise ConfigError(str(failure)) from None
        found |= {name + _CODES: weight.quantized, name + _SCALE: weight.scale}
    return found


def pop_quantized(tensors: dict[str, Tensor], source: str, error: ErrorType, remedy: str) -> dict[str, QuantizedWeight]:
    """Take the quantized matrices out of `tensors`, by name.

    Raises:
        error: one lacks its scales, is there as numbers too, or has a shape or type that cannot be.
    """
    names = sorted(key.removesuffix(_CODES) for key in tensors if key.endswith(_CODES))
    found = {}
    for name in names:
        if name in tensors or name + _SCALE not in tensors:
            raise error(f"{source}: the tensor {name} must be either numbers, or codes with scales. {remedy}")
        codes = tensors.pop(name + _CODES)
        scale = tensors.pop(name + _SCALE)
        fits = codes.dim() == 2 and scale.shape == (len(codes), 1)
        if not fits or codes.dtype != torch.uint8 or scale.dtype != torch.float32:
            raise error(
                f"{source}: the tensor {name} has codes {list(codes.shape)} of {codes.dtype} and scales "
                f"{list(scale.shape)} of {scale.dtype}, but must have a scale of float32 a row of uint8. {remedy}"
            )
        if not bool(scale.isfinite().all()):
            raise error(f"{source}: the tensor {name} has a scale that is NaN or infinite. {remedy}")
        found[name] = QuantizedWeight(8, codes, _ZERO, scale, None, None)
    return found


CONFIG = "config.json"
FORMATS: Mapping[str, type[EagleConfig] | type[MedusaConfig] | type[BlockConfig]] = MappingProxyType(
    {"forerun-eagle": EagleConfig, "forerun-medusa": MedusaConfig, "forerun-block": BlockConfig}
)
FORMAT_VERSION = 1
FC = "fc.weight"
"""The projection that public EAGLE heads begin with, and language models have not."""
_D2T = "d2t"
_FORMER = {"attention_gate": False, "rotated": None}
"""Fields of earlier versions, and their values in the heads that are read."""
_TRAIN_AGAIN = "Train it to its end, or take an earlier checkpoint."
_NEWER = "Read it with the version of forerun that wrote it."


def save_head(
    folder: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    d2t: Tensor | None = None,
    record: Mapping[str, Any] | None = None,
    *,
    fingerprint: str = "",
    number_format: str = "",
    quantize: Literal["int8"] | None = None,
) -> None:
    """Write a head in forerun's form. A new folder appears whole or not at all; in one that is there, files are
    replaced one by one, and what a kill between them leaves is found damaged by its checksum.

    Args:
        tensors: all of `config.tensors()`, of floating point numbers.
        d2t: [draft_vocab_size] offsets; may be None where the head proposes every token.
        record: how it was trained; values of JSON.
        fingerprint: of its target. number_format: of the target's weights.
        quantize: "int8" keeps the matrices at 8 bits with a scale a row.

    Raises:
        ConfigError: a tensor is missing, unknown, of another shape, NaN or infinite; or the folder cannot be written.
    """
    from safetensors.torch import save

    source = str(folder)
    form = next((name for name, kind in FORMATS.items() if type(config) is kind), None)
    if form is None:
        raise ConfigError(f"{source}: a layer of its target's own kind stays in its target's checkpoint.")
    check_loaded(config, tensors, source, ConfigError, _TRAIN_AGAIN)
    offsets = checked_d2t(d2t, config, source, ConfigError, "Give the one that it was trained with.")
    kept = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    if quantize is not None:
        kept = quantize_matrices(kept)
    if offsets is not None:
        kept[_D2T] = offsets.to(torch.int32)
    weights = save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in kept.items()})
    json_fields = {
        "format": form,
        "format_version": FORMAT_VERSION,
        "head": asdict(config),
        "target": {"fingerprint": fingerprint, "number_format": number_format},
        "record": json.loads(json.dumps(dict(record or {}))),
    }
    json_fields["checksum"] = _checksum(json_fields, weights)
    with (new_files if folder.is_dir() else whole_folder)(folder, ConfigError) as fresh:
        write_bytes(fresh / WEIGHTS, weights, error=ConfigError)
        write_json(fresh / CONFIG, json_fields, error=ConfigError)


def load_head(folder: Path, num_layers: int | None = None) -> StoredHead[HeadConfig]:
    """Read a head: one of forerun's form, or a public EAGLE-1, EAGLE-3, `speculators`, DFlash or Medusa head.

    Args:
        num_layers: of the target. Public heads may be silent about the layers whose states they read, which then
            follow from it.

    Raises:
        ModelLoadError: there is none, it is damaged, its files contradict each other, or `num_layers` is needed.
        UnsupportedModelError: it is a public head of a kind that is not supported.
    """
    settings = head_settings(folder)
    if "format" in settings.values:
        return _read(folder, settings)
    return (read_medusa if is_medusa(settings) else read_public)(folder, settings, num_layers)


@dataclass(frozen=True, slots=True)
class HeadHeader:
    """The part of a head that is known before its tensors are read.

    Attributes:
        dtype: of its numbers.
        is_quantized: its matrices are stored at 8 bits, and dequantized when they are read.
    """

    config: HeadConfig
    dtype: torch.dtype
    is_quantized: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors after reading."""
        return sum(
            math.prod(shape) * self.dtype.itemsize
            + (math.prod(shape) + 4 * shape[0] if self.is_quantized and len(shape) == 2 else 0)
            for shape in self.config.tensors().values()
        )


def head_header(folder: Path, num_layers: int | None = None) -> HeadHeader:
    """Return the configuration of a head, and what the header of its tensors says.

    Raises:
        ModelLoadError, UnsupportedModelError: as `load_head`, as far as the header shows.
    """
    settings = head_settings(folder)
    with as_load_errors(f"{folder / WEIGHTS}: the weights are damaged", REMEDY):
        stored = open_head_slices(folder)
    if "format" in settings.values:
        config = _config(settings.fields("head"), FORMATS[settings.string("format", choices=tuple(FORMATS))])
    elif is_medusa(settings):
        config = medusa_config_of(settings, stored, num_layers)
    else:
        config = public_config_of(settings, stored, str(folder), num_layers)
    return HeadHeader(config, float_type(stored.values()), any(name.endswith(_CODES) for name in stored))


def float_type(tensors: Iterable[TensorSpec]) -> torch.dtype:
    """Return the type of the first of these tensors that are numbers; float32 if none is."""
    named = {name: dtype for dtype, name in FLOATS.items()}
    return next((named[kind] for each in tensors if (kind := each.get_dtype()) in named), torch.float32)


def head_settings(folder: Path) -> Fields:
    """Read config.json. Raises ModelLoadError if there is none, or if it is not JSON."""
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder} holds no {CONFIG}. Give the folder of a head.")
    return Fields.read(folder / CONFIG, ModelLoadError, remedy=REMEDY)


def is_head(folder: Path) -> bool:
    """Return whether a folder holds a draft head. A damaged one may not be recognised.

    Raises:
        ModelLoadError: config.json is no JSON.
    """
    if not (folder / CONFIG).is_file():
        return False
    settings = head_settings(folder)
    json_fields = {"format", SPECULATORS, "draft_vocab_size"} & settings.values.keys()
    if json_fields or is_medusa(settings) or str(settings.values.get("model_type")).endswith(ASSISTANT):
        return True
    with as_load_errors(f"{folder / WEIGHTS}: the weights are damaged", REMEDY):
        return (folder / WEIGHTS).is_file() and FC in open_head_slices(folder)


def _read(folder: Path, settings: Fields) -> StoredHead[HeadConfig]:
    from safetensors.torch import load

    source = str(folder)
    path = folder / WEIGHTS
    kind = FORMATS[settings.string("format", choices=tuple(FORMATS))]
    version = settings.integer("format_version")
    if version != FORMAT_VERSION:
        raise ModelLoadError(f"{settings.place}: format_version is {version}, not {FORMAT_VERSION}. {_NEWER}")
    try:
        with open_regular(path) as file:
            weights = file.read()
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise ModelLoadError(f"{path} cannot be read: {reason}. {REMEDY}") from None
    if settings.string("checksum") != _checksum(settings.values, weights):
        raise ModelLoadError(f"{source} is damaged: {CONFIG} and {WEIGHTS} are not as they were written. {REMEDY}")
    config = _config(settings.fields("head"), kind)
    with as_load_errors(f"{path}: the weights are damaged", REMEDY):
        tensors = load(weights)
    d2t = checked_d2t(tensors.pop(_D2T, None), config, source, ModelLoadError, REMEDY)
    quantized = pop_quantized(tensors, source, ModelLoadError, REMEDY)
    tensors |= {name: weight.dequantize(torch.float32) for name, weight in quantized.items()}
    check_loaded(config, tensors, source, ModelLoadError, REMEDY)
    target = settings.fields("target")
    record = settings.fields("record").values
    fingerprint = target.string("fingerprint")
    trained_format = target.string("number_format")
    return StoredHead(config, tensors, d2t, fingerprint, record, trained_format, quantized)


def _checksum(json_fields: Mapping[str, Any], weights: bytes) -> str:
    """Return the digest of config.json without its checksum, and of the weights."""
    checked = {key: value for key, value in json_fields.items() if key != "checksum"}
    return digest(json.dumps(checked, sort_keys=True).encode(), b"\0", weights)


def _config(head: Fields, kind: type[EagleConfig] | type[MedusaConfig] | type[BlockConfig]) -> HeadConfig:
    """Build the configuration from the fields of a JSON object."""
    read: dict[str, Callable[[str], Any]] = {
        "int": head.integer,
        "bool": head.flag,
        "float": head.number,
        "str": head.string,
        "tuple[int, ...]": lambda key: tuple(head.list_of(key, int)),
        "tuple[str, ...]": lambda key: tuple(head.list_of(key, str)),
        "Mapping[str, Any]": lambda key: head.fields(key).values,
        "tuple[float, ...]": lambda key: tuple(head.list_of(key, float)),
        "int | None": lambda key: head.integer(key, None),
    }
    types = {each.name: str(each.type) for each in fields(kind)}
    optional = {each.name for each in fields(kind) if (each.default, each.default_factory) != (MISSING, MISSING)}
    for key, value in head.values.items():
        if key not in types and _FORMER.get(key, ...) != value:
            raise ModelLoadError(f"{head.place}: {key[:60]} is unknown here. {_NEWER}")
    json_fields = {name: made for name, made in types.items() if name in head.values or name not in optional}
    try:
        return kind(**{name: read[made](name) for name, made in json_fields.items()})
    except ConfigError as failure:
        raise ModelLoadError(f"{head.place}: {failure} {REMEDY}") from None


def shipped_head(target: FingerprintedTarget, kind: str = "eagle") -> Path | None:
    """Return the folder of the shipped head that was trained for these weights; None if there is none.

    Args:
        kind: a folder of `SHIPPED_HEADS`, which holds one folder a target.

    Raises:
        ModelLoadError: a shipped head is damaged.
    """
    of_this_size = [
        (folder, fingerprint)
        for folder, fingerprint in _shipped(SHIPPED_HEADS / kind)
        if (parsed := Fingerprint.parse(fingerprint)) is not None and parsed.vocab_size == target.vocab_size
    ]
    if not of_this_size:
        return None
    try:
        wanted = target_fingerprint(target)
    except UnsupportedModelError:
        return None
    return next((folder for folder, fingerprint in of_this_size if same_target(fingerprint, wanted)), None)


@lru_cache
def _shipped(source: Path) -> tuple[tuple[Path, str], ...]:
    """Return the folders of heads, and the fingerprints of their targets."""
    folders = (folder for folder in sorted(source.glob("*")) if (folder / CONFIG).is_file())
    return tuple((folder, head_settings(folder).fields("target").string("fingerprint")) for folder in folders)
