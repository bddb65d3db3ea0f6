"""A model as a Transformers folder: safetensors, configuration, generation configuration, tokenizer with template."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

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
from forerun.models import find_tokenizer, load_transformers_model
from forerun.models.loading.configuration import context_length
from forerun.models.loading.find_source import find_source
from forerun.models.loading.transformers_modules import quietly
from forerun.utils.files import REMEDY, new_files, refuse_to_overwrite, whole_folder


def export_hf(
    model: str | Path,
    out: Path,
    dtype: str = "auto",
    *,
    adapter: str | Path | None = None,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write any model that forerun loads as a Transformers folder.

    A new folder appears whole or not at all. In one that is there, files are replaced one by one, when all new ones are
    written beside them.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float64", or "auto", that of the model (float32 for float16).
        adapter: the folder of a PEFT LoRA adapter to merge.
        force: replace the model that `out` holds; other files there stay.
        max_shard_bytes: weights larger than that are written as several files with an index.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little room; unknown dtype.
        ModelLoadError: there is no such model, or it cannot be read.
    """
    if not force:
        refuse_to_overwrite(out, ConfigError)
    check_place(out)
    loaded, tokenizer = load_transformers_model(model, dtype, adapter), find_tokenizer(model, adapter)
    sizes = {tensor.data_ptr(): tensor for tensor in loaded.state_dict().values()}.values()
    check_room(out, sum(tensor.numel() * tensor.element_size() for tensor in sizes))
    eos, sampling = loaded.generation_config.eos_token_id or (), find_source(model).recommended_sampling()
    loaded.generation_config = generation_config(eos, tokenizer, sampling)
    with (new_files if out.is_dir() else whole_folder)(out, ConfigError) as fresh:
        try:
            with quietly():
                loaded.save_pretrained(fresh, max_shard_size=max_shard_bytes)
                if tokenizer is not None:
                    save_tokenizer(tokenizer, fresh, context_length(loaded.config))
        except SafetensorError as error:  # a full disk
            raise ConfigError(f"{out} cannot be written: {error}. {REMEDY}") from error
        for path in fresh.glob("*.safetensors"):
            path.chmod((fresh / "config.json").stat().st_mode)  # they are written for the user alone
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    remove_former(out, written.keys())
    return Exported(
        num_parameters=sum(tensor.numel() for tensor in sizes),
        dtype=str(loaded.dtype).removeprefix("torch."),
        nbytes=sum(written.values()),
        files=tuple(sorted(written)),
    )
