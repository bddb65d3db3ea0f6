"""A model whose matrices are kept in codes, as a folder that forerun serves without quantising anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from forerun import __version__
from forerun.errors import ConfigError
from forerun.export.files import (
    MAX_SHARD_BYTES,
    Exported,
    check_place,
    check_room,
    generation_config,
    remove_former,
    save_tokenizer,
)
from forerun.files.json_file import read_json
from forerun.files.write import REMEDY, new_files, refuse_to_overwrite, whole_folder, write_bytes, write_json
from forerun.models import find_tokenizer
from forerun.models.configuration import context_length
from forerun.models.quantising import LAYOUT, METHOD, Quantisation
from forerun.models.saving import ToSave, to_save
from forerun.models.transformers_model import quietly

CARD = "README.md"
NOT_MEASURED = "Not measured."


def export_quantised(
    model: str | Path,
    out: Path,
    quantize: Quantisation,
    *,
    adapter: str | Path | None = None,
    force: bool = False,
    cost: Callable[[], str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write any model that forerun quantises as a folder, which holds what `load_model(model, quantize=...)` computes
    with. It appears as those of `export_hf` do.

    Args:
        adapter: the folder of a PEFT LoRA adapter to merge first.
        force: replace the model that `out` holds, and its card; other files there stay.
        cost: gives what the card says of what quantising lost, as Markdown; called before the model is read. None: that
            it was not measured.
        max_shard_bytes: weights larger than that are written as several files with an index.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little room.
        ModelLoadError: there is no such model, it cannot be read, or not be quantised.
    """
    if not force:
        refuse_to_overwrite(out, ConfigError)
    check_place(out)
    measured, tokenizer = cost() if cost is not None else NOT_MEASURED, find_tokenizer(model, adapter)
    saved = to_save(model, quantize, adapter)
    check_room(out, saved.nbytes)
    generation = generation_config(saved.eos_token_ids, tokenizer, saved.sampling)
    with (new_files if out.is_dir() else whole_folder)(out, ConfigError) as fresh:
        try:
            _write_weights(saved, fresh, max_shard_bytes)
            with quietly():
                saved.config.save_pretrained(fresh)
                generation.save_pretrained(fresh)
                if tokenizer is not None:
                    save_tokenizer(tokenizer, fresh, context_length(saved.config))
        except SafetensorError as error:  # a full disk
            raise ConfigError(f"{out} cannot be written: {error}. {REMEDY}") from error
        _write_settings(fresh / "config.json", quantize, saved.dtype)
        card = _card(str(model), None if adapter is None else str(adapter), quantize, saved.dtype, measured)
        write_bytes(fresh / CARD, card.encode(), error=ConfigError)
        for path in fresh.glob("*.safetensors"):
            path.chmod((fresh / "config.json").stat().st_mode)  # they are written for the user alone
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    remove_former(out, written.keys())
    return Exported(saved.num_parameters, quantize, sum(written.values()), tuple(sorted(written)))


def _write_weights(saved: ToSave, folder: Path, max_shard_bytes: int) -> None:
    """Write the tensors, a file's worth of them in memory at a time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def write() -> None:
        shards.append(list(pending))
        save_file(pending, folder / f"model-{len(shards):05}.safetensors", metadata={"format": "pt"})
        pending.clear()

    for part in saved.parts:
        size = sum(tensor.nbytes for tensor in part.values())
        if pending and pending_bytes + size > max_shard_bytes:
            write()
            pending_bytes = 0
        pending.update(part)
        pending_bytes, total = pending_bytes + size, total + size
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


def _write_settings(path: Path, quantize: Quantisation, dtype: str) -> None:
    """Say in config.json how the weights are kept."""
    settings: dict[str, Any] = read_json(path, ConfigError)
    settings["dtype"] = dtype
    settings["quantization_config"] = {"quant_method": METHOD, "format": LAYOUT, "quantize": quantize}
    write_json(path, settings, error=ConfigError)


def _card(model: str, adapter: str | None, quantize: Quantisation, dtype: str, measured: str) -> str:
    name = Path(model).name or model
    merged = f", with the adapter `{Path(adapter).name}` merged" if adapter else ""
    kept = {
        "int8": "Matrices are kept at 8 bits, with one scale per output channel.",
        "int4": "Matrices are kept at 4 bits in groups of 32 with scale and minimum, embedding and output layer at 8 "
        "bits with one scale per row.",
    }[quantize]
    return f"""# {name}, {quantize}

The weights of `{name}`{merged}, quantised by forerun {__version__}. {kept} What the model's files had at these bits
in GGUF's blocks of 32 is kept as it was there. Norms, biases and all else are {dtype}.

```sh
forerun generate "..." --model FOLDER
```

No other program reads these weights: `forerun export hf FOLDER OUT` writes what they stand for as a Transformers
folder. The licence is that of `{name}`.

## What quantising lost

{measured.strip()}
"""
