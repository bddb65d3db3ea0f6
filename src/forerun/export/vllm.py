"""Export of draft heads and draft models as folders for vLLM, with their speculative configuration.

vLLM ignores missing tensors silently, so a head is compared with its configuration first, and features that the format
does not have are errors. vLLM does not draft beyond max_position_embeddings of a head, so the target's context length
is written there; rotary embeddings have no last position.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun import __version__
from forerun.config import AUTO, DTYPES, HEAD_FORMS
from forerun.drafters.models.block.checkpoint_format import block_settings, block_tensors, check_block_export
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.checkpoint_format import (
    SPECULATORS,
    check_eagle_export,
    eagle_settings,
    eagle_tensors,
)
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import CONFIG, head_settings, load_head
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.heads.fingerprint import check_target
from forerun.drafters.models.heads.weights_file import WEIGHTS
from forerun.drafters.models.medusa.checkpoint_format import (
    FORM as MEDUSA,
    exported_medusa_config,
    medusa_settings,
    medusa_tensors,
)
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.export.files import DRAFT_TOKENS, Exported, check_disk_space, check_draft, check_output, model_folder
from forerun.export.transformers import export_hf
from forerun.models import Model, load_model
from forerun.models.loading.source import find_source
from forerun.utils.files import write_bytes, write_json

SPECULATIVE = "speculative_config.json"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class ExportedForVllm:
    """An exported folder.

    Attributes:
        files: its size and files.
        speculative: value of vLLM's --speculative-config.
    """

    files: Exported
    speculative: dict[str, Any]


def export_vllm(
    head: Path,
    out: Path,
    target: str,
    *,
    form: str = AUTO,
    dtype: str = "auto",
    num_draft_tokens: int | None = None,
    force: bool = False,
) -> ExportedForVllm:
    """Write a head for vLLM, in a folder as by `export_hf`.

    Args:
        head: folder of a head, of forerun's form or a public one.
        target: model of the head; the rows of its output layer are written if the head has none.
        form: "eagle", the format of EAGLE-1 or EAGLE-3; "medusa"; "speculators", the only one of block heads; "auto":
            that of the head.
        dtype: of the tensors; "auto" is that of the head, float32 for quantized ones.
        num_draft_tokens: of the speculative configuration, and the number of Medusa heads that are written; None: 3,
            or all Medusa heads.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little disk space; an unknown form or dtype.
        ModelLoadError: head or target cannot be read.
        UnsupportedModelError: the head has a feature that the form does not have.
        IncompatibleDrafterError: the head is of another target.
    """
    _check_choice("form", form, HEAD_FORMS)
    _check_choice("dtype", dtype, DTYPES)
    check_output(out, force)
    head_settings(head)  # an invalid folder is an error before the target is loaded
    model = load_model(target)
    stored = load_head(head, model.num_layers)
    check_target(stored.fingerprint, model, str(head))
    converted = _VllmHead.of(stored, model, str(head), target, form, dtype, num_draft_tokens)
    speculative = {"method": converted.method, "model": str(out), "num_speculative_tokens": converted.num_draft_tokens}
    files = _write(out, converted, speculative, vllm_card(head.name, f"head `{head.name}`", target, speculative))
    return ExportedForVllm(files, speculative)


@dataclass(frozen=True, slots=True)
class _VllmHead:
    """A head in the format of its folder.

    Attributes:
        settings, tensors: contents of config.json and model.safetensors.
        dtype: of the tensors.
        method: vLLM's name of the drafting method.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    method: str
    num_draft_tokens: int

    @classmethod
    def of(
        cls, stored: StoredHead[HeadConfig], model: Model, head: str, target: str, form: str, dtype: str, k: int | None
    ) -> _VllmHead:
        """Convert a head; arguments as `export_vllm`. head, target: their names."""
        first = next(iter(stored.tensors.values()))
        kept_in = first.dtype if dtype == "auto" else getattr(torch, dtype)
        name = str(kept_in).removeprefix("torch.")
        rows = model.output_rows(stored.token_ids).cpu()
        if isinstance(stored.config, MedusaConfig):
            medusa = exported_medusa_config(stored.config, stored.d2t, MEDUSA if form == AUTO else form, k, head)
            tensors = medusa_tensors(medusa, stored.tensors, stored.d2t, rows, kept_in)
            return cls(medusa_settings(medusa, name), tensors, kept_in, MEDUSA, medusa.num_heads)
        count = k or DRAFT_TOKENS
        architectures = list(find_source(target).config().architectures or [])
        named: dict[str, Any] = {"target": target, "architectures": architectures, "num_draft_tokens": count}
        if isinstance(stored.config, BlockConfig):
            check_block_export(stored.config, stored.d2t, form, model.num_layers, count, head)
            block = replace(stored.config, max_positions=max(stored.config.max_positions, model.context_length))
            settings = block_settings(block, name, **named)
            tensors = block_tensors(block, stored.tensors, stored.d2t, rows, kept_in)
            return cls(settings, tensors, kept_in, settings[SPECULATORS], count)
        eagle = stored.of(EagleConfig, head, "this export")
        config = eagle.config
        form = HEAD_FORMS[1] if form == AUTO else form
        check_eagle_export(config, eagle.d2t, form, model.num_layers, head)
        tensors = eagle_tensors(config, eagle.tensors, eagle.d2t, form, rows, kept_in)
        config = replace(config, max_positions=max(config.max_positions, model.context_length))
        settings = eagle_settings(config, form, name, **named)
        return cls(settings, tensors, kept_in, "eagle" if config.version == 1 else "eagle3", count)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(choices)}.")


def _write(out: Path, converted: _VllmHead, speculative: dict[str, Any], card: str) -> Exported:
    from safetensors.torch import save

    tensors = converted.tensors
    check_disk_space(out, sum(tensor.nbytes for tensor in tensors.values()))
    with model_folder(out) as (fresh, written):
        write_bytes(fresh / WEIGHTS, save(tensors, metadata={"format": "pt"}), error=ConfigError)
        write_json(fresh / CONFIG, converted.settings, error=ConfigError)
        write_json(fresh / SPECULATIVE, speculative, error=ConfigError)
        write_bytes(fresh / CARD, card.encode(), error=ConfigError)
    numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    dtype = str(converted.dtype).removeprefix("torch.")
    count = sum(tensor.numel() for tensor in numbers.values())
    return Exported(count, dtype, sum(written.values()), tuple(sorted(written)))


def vllm_card(name: str, what: str, target: str, speculative: dict[str, Any]) -> str:
    """Return the text of the model card. what: the draft, such as "head `name`"."""
    return f"""# {name}, for vLLM

The draft {what} of the target `{target}`, written by forerun {__version__}. With `{SPECULATIVE}`, whose
`model` is this folder:

```sh
vllm serve TARGET --speculative-config '{json.dumps(speculative)}'
```

The licence is that of the {what}.
"""


def export_vllm_draft(
    draft: str | Path,
    out: Path,
    target: str,
    *,
    dtype: str = "auto",
    num_draft_tokens: int | None = None,
    force: bool = False,
) -> ExportedForVllm:
    """Write a draft model for vLLM, in a folder as by `export_hf`.

    Args:
        draft: a model, as `load_model` takes it.
        target: the model that it drafts for.
        dtype, force: as of `export_hf`.
        num_draft_tokens: of the speculative configuration; None: `DRAFT_TOKENS`.

    Raises:
        ConfigError, ModelLoadError: as `export_hf`.
        IncompatibleDrafterError: its vocabulary is another, or of another width; it proposes only a part of it.
    """
    ours, theirs = check_draft(draft, target, "vLLM's method draft_model")
    if ours.size != theirs.size:
        raise IncompatibleDrafterError(
            f"{draft} has logits of {ours.size} tokens and {target} of {theirs.size}, which differ by padding alone, "
            "but vLLM's method draft_model asks for the same number. Draft with it in forerun, or pad one of them."
        )
    files = export_hf(draft, out, dtype, force=force)
    speculative = {
        "method": "draft_model",
        "model": str(out),
        "num_speculative_tokens": num_draft_tokens or DRAFT_TOKENS,
    }
    source = find_source(draft)
    if source.mask_token(source.config()) is not None:
        speculative["parallel_drafting"] = True
    write_json(out / SPECULATIVE, speculative, error=ConfigError)
    card = vllm_card(Path(draft).name, f"model `{draft}`", target, speculative)
    write_bytes(out / CARD, card.encode(), error=ConfigError)
    return ExportedForVllm(files, speculative)
