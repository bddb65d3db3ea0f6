"""A draft head as a folder that vLLM loads, with the speculative configuration to start it by.

vLLM starts without a word when some tensors are missing, so all that is written is compared with the head's
configuration first, and what the form cannot say is refused by name. vLLM drafts nothing that holds beyond the head's
max_position_embeddings, so the target's context length is written there: a rotation has no last position.
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
from forerun.drafters.block.checkpoint_format import block_settings, block_tensors, check_block_export
from forerun.drafters.block.config import BlockConfig
from forerun.drafters.eagle.checkpoint_format import SPECULATORS, check_eagle_export, eagle_settings, eagle_tensors
from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.heads.checkpoint_formats import WEIGHTS
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.fingerprint import check_target
from forerun.drafters.heads.folder import CONFIG, head_settings, load_head
from forerun.drafters.medusa.checkpoint_format import (
    FORM as MEDUSA,
    exported_medusa_config,
    medusa_settings,
    medusa_tensors,
)
from forerun.drafters.medusa.config import MedusaConfig
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.export.files import DRAFT_TOKENS, Exported, check_draft, check_place, check_room, remove_former
from forerun.export.transformers import export_hf
from forerun.models import Model, load_model
from forerun.models.loading.find_source import find_source
from forerun.utils.files import new_files, refuse_to_overwrite, whole_folder, write_bytes, write_json

SPECULATIVE = "speculative_config.json"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class ExportedForVllm:
    """What was written.

    Attributes:
        files: its size and files.
        speculative: what vLLM's --speculative-config takes.
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
    """Write a head for vLLM. It appears as the folders of `export_hf` do.

    Args:
        head: folder of a head, of forerun's form or a public one.
        target: that the head was trained for; the rows of its output layer are written where a head has none.
        form: "eagle", EAGLE-1's or EAGLE-3's, as the head is one; "medusa"; "speculators"; "auto": EAGLE's or Medusa's,
            and of a block head the last, since it has no other.
        dtype: of the tensors; "auto" is what the head has, float32 for codes.
        num_draft_tokens: of the speculative configuration; None: 3, or as many as there are Medusa heads, of which
            this many are written.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little room; an unknown form or dtype.
        ModelLoadError: head or target cannot be read.
        UnsupportedModelError: the head has what the form cannot say.
        IncompatibleDrafterError: the head is of another target.
    """
    _check_choice("form", form, HEAD_FORMS)
    _check_choice("dtype", dtype, DTYPES)
    if not force:
        refuse_to_overwrite(out, ConfigError)
    check_place(out)
    head_settings(head)  # what is no head is told before the target is loaded
    model = load_model(target)
    stored = load_head(head, model.num_layers)
    check_target(stored.fingerprint, model, str(head))
    said = _Said.of(stored, model, str(head), target, form, dtype, num_draft_tokens)
    speculative = {"method": said.method, "model": str(out), "num_speculative_tokens": said.num_draft_tokens}
    files = _write(out, said, speculative, vllm_card(head.name, f"head `{head.name}`", target, speculative))
    return ExportedForVllm(files, speculative)


@dataclass(frozen=True, slots=True)
class _Said:
    """A head as its folder says it.

    Attributes:
        settings, tensors: of config.json and model.safetensors.
        dtype: of the tensors.
        method: vLLM's name of it.
    """

    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    method: str
    num_draft_tokens: int

    @classmethod
    def of(
        cls, stored: StoredHead[HeadConfig], model: Model, head: str, target: str, form: str, dtype: str, k: int | None
    ) -> _Said:
        """As `export_vllm`. head: its name, for messages. target: that of the model."""
        first = next(iter(stored.tensors.values()))
        kept_in = first.dtype if dtype == "auto" else getattr(torch, dtype)
        name, rows = str(kept_in).removeprefix("torch."), model.output_rows(stored.token_ids).cpu()
        if isinstance(stored.config, MedusaConfig):
            medusa = exported_medusa_config(stored.config, stored.d2t, MEDUSA if form == AUTO else form, k, head)
            tensors = medusa_tensors(medusa, stored.tensors, stored.d2t, rows, kept_in)
            return cls(medusa_settings(medusa, name), tensors, kept_in, MEDUSA, medusa.num_heads)
        count, architectures = k or DRAFT_TOKENS, list(find_source(target).config().architectures or [])
        named: dict[str, Any] = {"target": target, "architectures": architectures, "num_draft_tokens": count}
        if isinstance(stored.config, BlockConfig):
            check_block_export(stored.config, stored.d2t, form, model.num_layers, count, head)
            block = replace(stored.config, max_positions=max(stored.config.max_positions, model.context_length))
            settings = block_settings(block, name, **named)
            tensors = block_tensors(block, stored.tensors, stored.d2t, rows, kept_in)
            return cls(settings, tensors, kept_in, settings[SPECULATORS], count)
        eagle = stored.of(EagleConfig, head, "this export")
        config, form = eagle.config, HEAD_FORMS[1] if form == AUTO else form
        check_eagle_export(config, eagle.d2t, form, model.num_layers, head)
        tensors = eagle_tensors(config, eagle.tensors, eagle.d2t, form, rows, kept_in)
        config = replace(config, max_positions=max(config.max_positions, model.context_length))
        settings = eagle_settings(config, form, name, **named)
        return cls(settings, tensors, kept_in, "eagle" if config.version == 1 else "eagle3", count)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(choices)}.")


def _write(out: Path, said: _Said, speculative: dict[str, Any], card: str) -> Exported:
    from safetensors.torch import save

    tensors = said.tensors
    check_room(out, sum(tensor.nbytes for tensor in tensors.values()))
    with (new_files if out.is_dir() else whole_folder)(out, ConfigError) as fresh:
        write_bytes(fresh / WEIGHTS, save(tensors, metadata={"format": "pt"}), error=ConfigError)
        write_json(fresh / CONFIG, said.settings, error=ConfigError)
        write_json(fresh / SPECULATIVE, speculative, error=ConfigError)
        write_bytes(fresh / CARD, card.encode(), error=ConfigError)
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    remove_former(out, written.keys())
    numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    dtype = str(said.dtype).removeprefix("torch.")
    count = sum(tensor.numel() for tensor in numbers.values())
    return Exported(count, dtype, sum(written.values()), tuple(sorted(written)))


def vllm_card(name: str, what: str, target: str, speculative: dict[str, Any]) -> str:
    """The text of CARD. what: the draft, as "head `name`"."""
    return f"""# {name}, for vLLM

The draft {what} of the target `{target}`, written by forerun {__version__}. With `{SPECULATIVE}`, whose
`model` is this folder:

```sh
vllm serve TARGET --speculative-config '{json.dumps(speculative)}'
```

The licence is that of the {what}.
"""


# A draft model as a folder that vLLM loads, with the speculative configuration to start it by.

METHOD = "draft_model"


def export_vllm_draft(
    draft: str | Path,
    out: Path,
    target: str,
    *,
    dtype: str = "auto",
    num_draft_tokens: int | None = None,
    force: bool = False,
) -> ExportedForVllm:
    """Write a draft model for vLLM. It appears as the folders of `export_hf` do.

    Args:
        draft: a model, as `load_model` takes it.
        target: that it drafts for.
        dtype, force: as of `export_hf`.
        num_draft_tokens: of the speculative configuration; None: `DRAFT_TOKENS`.

    Raises:
        ConfigError, ModelLoadError: as `export_hf`.
        IncompatibleDrafterError: its vocabulary is another, or of another width; it proposes a part of it only.
    """
    ours, theirs = check_draft(draft, target, "vLLM's method draft_model")
    if ours.size != theirs.size:
        raise IncompatibleDrafterError(
            f"{draft} has logits of {ours.size} tokens and {target} of {theirs.size}, which differ by padding alone, "
            "but vLLM's method draft_model asks for the same number. Draft with it in forerun, or pad one of them."
        )
    files = export_hf(draft, out, dtype, force=force)
    speculative = {
        "method": METHOD,
        "model": str(out),
        "num_speculative_tokens": num_draft_tokens or DRAFT_TOKENS,
    }
    write_json(out / SPECULATIVE, speculative, error=ConfigError)
    card = vllm_card(Path(draft).name, f"model `{draft}`", target, speculative)
    write_bytes(out / CARD, card.encode(), error=ConfigError)
    return ExportedForVllm(files, speculative)
