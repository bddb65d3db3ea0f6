"""Export of a model as a Transformers folder: safetensors, configurations, tokenizer with template."""

from __future__ import annotations

from pathlib import Path

from forerun.export.files import (
    MAX_SHARD_BYTES,
    Exported,
    check_disk_space,
    check_output,
    generation_config,
    model_folder,
    save_tokenizer,
)
from forerun.models import find_tokenizer, load_transformers_model
from forerun.models.loading.configuration import context_length
from forerun.models.loading.source import find_source
from forerun.models.loading.transformers_modules import quietly


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

    A new folder appears whole or not at all. In an existing one files are replaced at the end.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float64", or "auto", that of the model (float32 for float16).
        adapter: the folder of a PEFT LoRA adapter to merge.
        force: replace the model that `out` holds; other files there stay.
        max_shard_bytes: weights larger than that are written as several files with an index.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little disk space; unknown dtype.
        ModelLoadError: there is no such model, or it cannot be read.
    """
    check_output(out, force)
    loaded = load_transformers_model(model, dtype, adapter)
    tokenizer = find_tokenizer(model, adapter)
    sizes = {tensor.data_ptr(): tensor for tensor in loaded.state_dict().values()}.values()
    check_disk_space(out, sum(tensor.numel() * tensor.element_size() for tensor in sizes))
    eos = loaded.generation_config.eos_token_id or ()
    sampling = find_source(model).recommended_sampling()
    loaded.generation_config = generation_config(eos, tokenizer, sampling)
    with model_folder(out) as (fresh, written), quietly():
        loaded.save_pretrained(fresh, max_shard_size=max_shard_bytes)
        if tokenizer is not None:
            save_tokenizer(tokenizer, fresh, context_length(loaded.config))
    return Exported(
        num_parameters=sum(tensor.numel() for tensor in sizes),
        dtype=str(loaded.dtype).removeprefix("torch."),
        nbytes=sum(written.values()),
        files=tuple(sorted(written)),
    )
