"""Export of models and draft heads with quantized matrices, which forerun serves without quantizing again."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forerun import __version__
from forerun.config import QUANTISATIONS
from forerun.drafters.models.head_files.folder import CONFIG, float_type, head_settings, load_head, save_head
from forerun.drafters.models.heads.weights_file import MEDUSA_WEIGHTS, WEIGHTS, open_head_slices
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.export.files import (
    MAX_SHARD_BYTES,
    Exported,
    check_disk_space,
    check_output,
    generation_config,
    model_folder,
    save_tokenizer,
)
from forerun.models import find_tokenizer
from forerun.models.fused.experts import take_experts_apart
from forerun.models.linear import LinearPart
from forerun.models.loading.configuration import context_length, refuse_unservable
from forerun.models.loading.load import WeightReader
from forerun.models.loading.quantized_tensors import stored_tensors
from forerun.models.loading.source import ModelSource, Quantization, find_source
from forerun.models.loading.transformers_modules import quietly
from forerun.models.loading.weight_maker import LAYOUT, METHOD, WeightMaker, matrices, outer_modules
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.weight_plan import WeightPlan
from forerun.utils.files import whole_folder, write_bytes, write_json
from forerun.utils.foreign_errors import REMEDY
from forerun.utils.json_file import read_json

_BYTES = {8: 1.1, 4: 0.7}
"""Bytes of a quantized value, with its share of the scales."""


CARD = "README.md"
NOT_MEASURED = "Not measured."


def export_quantized(
    model: str | Path,
    out: Path,
    quantize: Quantization,
    *,
    adapter: str | Path | None = None,
    force: bool = False,
    cost: Callable[[], str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write a folder, as `export_hf` does, with the quantized weights that `load_model(model, quantize=...)` computes
    with.

    Args:
        adapter: the folder of a PEFT LoRA adapter to merge first.
        force: replace the model that `out` holds, and its card; other files there stay.
        cost: returns the text of the card about the loss by quantizing, as Markdown; called before the model is read.
            None: not measured.
        max_shard_bytes: weights larger than that are written as several files with an index.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little disk space.
        ModelLoadError: there is no such model, it cannot be read, or not be quantized.
    """
    check_output(out, force)
    measured = cost() if cost is not None else NOT_MEASURED
    tokenizer = find_tokenizer(model, adapter)
    source = find_source(model)
    config = source.config()
    spec = refuse_unservable(config, source.name).served
    loaded, maker = _read(source, config, spec, quantize, adapter)
    dtype = str(maker.plan.dtype).removeprefix("torch.")
    num_parameters = sum(each.numel() for each in loaded.parameters())
    loaded.config.architectures = [type(loaded).__name__]
    check_disk_space(out, _nbytes(loaded, quantize, spec))
    generation = generation_config(source.eos_token_ids(config), tokenizer, source.recommended_sampling())
    with model_folder(out) as (fresh, written):
        _write_weights(_parts(loaded, maker, spec, source.name), fresh, max_shard_bytes)
        with quietly():
            loaded.config.save_pretrained(fresh)
            generation.save_pretrained(fresh)
            if tokenizer is not None:
                save_tokenizer(tokenizer, fresh, context_length(loaded.config))
        form = {"quant_method": METHOD, "format": LAYOUT, "quantize": quantize}
        settings = read_json(fresh / CONFIG, ConfigError) | {"dtype": dtype, "quantization_config": form}
        write_json(fresh / CONFIG, settings, error=ConfigError)
        card = _card(str(model), None if adapter is None else str(adapter), quantize, dtype, measured)
        write_bytes(fresh / CARD, card.encode(), error=ConfigError)
    return Exported(num_parameters, quantize, sum(written.values()), tuple(sorted(written)))


def _read(
    source: ModelSource, config: Any, spec: DecoderSpec | None, quantize: Quantization, adapter: str | Path | None
) -> tuple[Any, WeightMaker]:
    """Return the modules of a model with an adapter merged and experts apart, and what makes its weights."""
    plan = WeightPlan.of(
        *(source, spec, "auto", torch.device("cpu"), quantize),
        is_fused=spec is not None,
        has_adapter=adapter is not None,
    )
    model, maker = WeightReader(source, config, spec, plan, adapter, attention=None).read()
    assert maker is not None  # they are quantized
    if spec is not None:
        take_experts_apart(spec, model)
    return model, maker


def _nbytes(model: Any, quantize: Quantization, spec: DecoderSpec | None) -> int:
    """Estimate the bytes of the saved tensors: quantized values, scales, and unquantized tensors."""
    outer = outer_modules(model, spec)
    quantized = {
        f"{path}.weight": _BYTES[8 if module in outer else QUANTISATIONS[quantize][0]]
        for path, module in matrices(model, spec).items()
    }
    parameters = model.named_parameters()
    return int(sum(each.numel() * quantized.get(name, each.element_size()) for name, each in parameters))


def _parts(model: Any, maker: WeightMaker, spec: DecoderSpec | None, name: str) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors to save by name, those of one parameter at a time; quantize them lazily."""
    from transformers.pytorch_utils import Conv1D

    found = matrices(model, spec)
    if not found:
        raise UnsupportedModelError(f"{name} has no linear layers that could be quantized. Serve it as it is.")
    head, embedding, *inner = outer_modules(model, spec)
    for path, module in found.items():
        is_transposed = type(module) is Conv1D
        key = f"{path}.weight"
        stored = module.get_parameter("weight")
        part = LinearPart(key, stored.T if is_transposed else stored, None, is_transposed)
        weight = maker.weight(part, is_outer=module in (head, embedding, *inner))
        yield stored_tensors(key, weight, is_transposed=is_transposed)
    is_tied = head is not None and head.weight is embedding.weight
    done = {f"{path}.weight" for path, module in model.named_modules() if path in found or (is_tied and module is head)}
    for key, tensor in model.state_dict().items():
        if key not in done:
            yield {key: tensor.detach().clone()}


def _write_weights(parts: Iterator[dict[str, Tensor]], folder: Path, max_shard_bytes: int) -> None:
    """Write the tensors, with those of one file in memory at a time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def write() -> None:
        shards.append(list(pending))
        save_file(pending, folder / f"model-{len(shards):05}.safetensors", metadata={"format": "pt"})
        pending.clear()

    for part in parts:
        size = sum(tensor.nbytes for tensor in part.values())
        if pending and pending_bytes + size > max_shard_bytes:
            write()
            pending_bytes = 0
        pending.update(part)
        pending_bytes = pending_bytes + size
        total = total + size
    write()
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index, error=ConfigError)
    for number, name in enumerate(names, 1):
        (folder / f"model-{number:05}.safetensors").rename(folder / name)


def _card(model: str, adapter: str | None, quantize: Quantization, dtype: str, measured: str) -> str:
    name = Path(model).name or model
    merged = f", with the adapter `{Path(adapter).name}` merged" if adapter else ""
    kept = {
        8: "Matrices are kept at 8 bits, with one scale per output channel.",
        4: "Matrices are kept at 4 bits in groups of 32 with scale and minimum, embedding and output layer at 8 "
        "bits with one scale per row.",
    }[QUANTISATIONS[quantize][0]]
    return f"""# {name}, {quantize}

The weights of `{name}`{merged}, quantized by forerun {__version__}. {kept} What the model's files had at these bits
in GGUF's blocks of 32 is kept as it was there. Norms, biases and all else are {dtype}.

```sh
forerun generate "..." --model FOLDER
```

No other program reads these weights: `forerun export hf FOLDER OUT` writes what they stand for as a Transformers
folder. The licence is that of `{name}`.

## What quantizing lost

{measured.strip()}
"""


_INT8: Literal["int8"] = "int8"


def export_head(head: Path, out: Path) -> Exported:
    """Write a head with its matrices at 8 bits and a scale per row, and copy the other files of its folder; or write
    what a pickled file holds as safetensors, beside a copy of its config.json.

    The folder is new.

    Args:
        head: folder of a head that forerun trained, or the pickled file of a public one.

    Raises:
        ConfigError: `out` exists or cannot be written; the disk has too little space; the head is of a public form, or
            at 8 bits already.
        ModelLoadError: the head cannot be read.
    """
    check_output(out)
    if head.is_file():
        return _export_pickled(head, out)
    if "format" not in head_settings(head).values:
        raise ConfigError(f"{head} is a head of a public form, which has no 8 bits. Give one that forerun trained.")
    stored = load_head(head)
    if stored.quantized:
        raise ConfigError(f"{head} is at 8 bits already. Copy the folder, or give the head that it was made of.")
    check_disk_space(out, stored.nbytes)
    beside = [path for path in sorted(head.iterdir()) if path.name not in (CONFIG, WEIGHTS) and path.is_file()]
    with whole_folder(out, ConfigError) as fresh:
        save_head(
            fresh,
            stored.config,
            stored.tensors,
            stored.d2t,
            stored.record,
            fingerprint=stored.fingerprint,
            number_format=stored.number_format,
            quantize=_INT8,
        )
        for path in beside:
            note = _NOTE if path.name == CARD else ""
            write_bytes(fresh / path.name, path.read_bytes() + note.encode(), error=ConfigError)
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    count = sum(tensor.numel() for tensor in stored.tensors.values())
    return Exported(count, _INT8, sum(written.values()), tuple(sorted(written)))


_READ_TENSORS = """
import sys, torch
from safetensors.torch import save_file
found = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
save_file({name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}, sys.argv[2])
"""
"""The program that reads a pickle, of which it makes nothing but tensors."""


def _export_pickled(file: Path, out: Path) -> Exported:
    """Write the tensors of a pickled file, which a process of its own reads. Errors as of `export_head`."""
    settings = file.with_name(CONFIG)
    head_settings(file.parent)
    check_disk_space(out, file.stat().st_size)
    weights = MEDUSA_WEIGHTS if file.stem == Path(MEDUSA_WEIGHTS).stem else WEIGHTS
    with whole_folder(out, ConfigError) as fresh:
        command = [sys.executable, "-P", "-c", _READ_TENSORS, str(file), str(fresh / weights)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {ended.returncode}"]
            raise ModelLoadError(f"{file}: no tensors could be read from it: {said[-1][:200]}. {REMEDY}")
        write_bytes(fresh / CONFIG, settings.read_bytes(), error=ConfigError)
        slices = open_head_slices(fresh).values()
        dtype = str(float_type(slices)).removeprefix("torch.")
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    count = sum(math.prod(each.get_shape()) for each in slices)
    return Exported(count, dtype, sum(written.values()), tuple(sorted(written)))


_NOTE = """
The matrices in this folder are kept at 8 bits, with a scale a row; the figures above are of the weights before that.
"""
