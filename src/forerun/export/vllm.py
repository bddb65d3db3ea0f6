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
from forerun.config import DTYPES, HEAD_FORMS
from forerun.errors import ConfigError
from forerun.export.files import Exported, check_place, check_room, remove_former
from forerun.files.write import new_files, refuse_to_overwrite, whole_folder, write_bytes, write_json
from forerun.heads.block_config import BlockConfig
from forerun.heads.config import HeadConfig
from forerun.heads.eagle_config import EagleConfig
from forerun.heads.fingerprint import check_target
from forerun.heads.folder import CONFIG, head_settings, load_head
from forerun.heads.medusa_config import MedusaConfig
from forerun.heads.public_block import block_public_tensors, block_settings, check_block_sayable
from forerun.heads.public_config import SPECULATORS
from forerun.heads.public_forms import WEIGHTS
from forerun.heads.public_medusa import FORM as MEDUSA, medusa_file, medusa_settings, sayable_medusa
from forerun.heads.public_writing import check_sayable, public_settings, public_tensors
from forerun.heads.stored import StoredHead
from forerun.models import Model, load_model
from forerun.models.sources import find_source

SPECULATIVE = "speculative_config.json"
CARD = "README.md"
DRAFT_TOKENS = 3
"""What is recommended where nothing is said."""


@dataclass(frozen=True, slots=True)
class ExportedHead:
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
    form: str | None = None,
    dtype: str = "auto",
    num_draft_tokens: int | None = None,
    force: bool = False,
) -> ExportedHead:
    """Write a head for vLLM. It appears as the folders of `export_hf` do.

    Args:
        head: folder of a head, of forerun's form or a public one.
        target: that the head was trained for; the rows of its output layer are written where a head has none.
        form: "eagle", EAGLE-1's or EAGLE-3's, as the head is one, "medusa" or "speculators"; None: the last for block
            heads, which have no other, else what the head is.
        dtype: of the tensors; "auto" is what the head has, float32 for codes.
        num_draft_tokens: of the speculative configuration; None: 3, or as many as there are Medusa heads, of which
            this many are written.

    Raises:
        ConfigError: `out` holds something, cannot be written, or has too little room; an unknown form or dtype.
        ModelLoadError: head or target cannot be read.
        UnsupportedModelError: the head has what the form cannot say.
        IncompatibleDrafterError: the head is of another target.
    """
    if form is not None:
        _check_choice("form", form, HEAD_FORMS)
    _check_choice("dtype", dtype, DTYPES)
    if not force:
        refuse_to_overwrite(out, ConfigError)
    check_place(out)
    head_settings(head)  # what is no head is told before the target is loaded
    model = load_model(target)
    stored = load_head(head, model.num_layers)
    check_target(stored.fingerprint, model, str(head))
    count = num_draft_tokens or DRAFT_TOKENS
    kept_in = next(iter(stored.tensors.values())).dtype if dtype == "auto" else getattr(torch, dtype)
    said = _Said(model, target, kept_in, count, str(head))
    if isinstance(stored.config, MedusaConfig):
        medusa = stored.of(MedusaConfig, str(head), "this export")
        (method, settings, tensors), count = said.medusa(medusa, form or MEDUSA, num_draft_tokens)
    elif isinstance(stored.config, BlockConfig):
        method, settings, tensors = said.block(stored.of(BlockConfig, str(head), "this export"), form)
    else:
        method, settings, tensors = said.eagle(stored.of(EagleConfig, str(head), "this export"), form or HEAD_FORMS[0])
    speculative = {"method": method, "model": str(out), "num_speculative_tokens": count}
    files = _write(out, settings, tensors, speculative, _card(head, target, speculative))
    return ExportedHead(files, speculative)


_Written = tuple[str, dict[str, Any], dict[str, Tensor]]
"""vLLM's name of the method, what config.json says, and the tensors."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What is written of a head, with its target.

    Attributes:
        dtype: of the tensors.
        what: the head, for messages.
    """

    model: Model
    target: str
    dtype: torch.dtype
    num_draft_tokens: int
    what: str

    def eagle(self, stored: StoredHead[EagleConfig], form: str) -> _Written:
        """Of an EAGLE head. Raises UnsupportedModelError where the form cannot say it."""
        config = stored.config
        check_sayable(config, stored.d2t, form, self.model.num_layers, self.what)
        config = replace(config, max_positions=max(config.max_positions, self.model.context_length))
        tensors = public_tensors(config, stored.tensors, stored.d2t, form, _output_rows(stored, self.model), self.dtype)
        settings = public_settings(
            config,
            form,
            self.number_format,
            target=self.target,
            architectures=self.architectures,
            num_draft_tokens=self.num_draft_tokens,
        )
        return "eagle" if config.version == 1 else "eagle3", settings, tensors

    def medusa(self, stored: StoredHead[MedusaConfig], form: str, num_heads: int | None) -> tuple[_Written, int]:
        """Of Medusa heads, and how many are written. Raises as `eagle`; ConfigError where there are fewer."""
        config = sayable_medusa(stored.config, stored.d2t, form, num_heads, self.what)
        tensors = medusa_file(config, stored.tensors, stored.d2t, _output_rows(stored, self.model), self.dtype)
        return (MEDUSA, medusa_settings(config, self.number_format), tensors), config.num_heads

    def block(self, stored: StoredHead[BlockConfig], form: str | None) -> _Written:
        """Of a block head. Raises ConfigError for another form or too many tokens, UnsupportedModelError as `eagle`."""
        config = stored.config
        if form not in (None, "speculators"):
            raise ConfigError(f"form is {form!r}, but a block head has no other form than 'speculators'. Leave it out.")
        if self.num_draft_tokens > config.block_size:
            raise ConfigError(
                f"num_draft_tokens is {self.num_draft_tokens}, but {self.what} was trained on blocks of "
                f"{config.block_size} tokens. Ask for no more than these."
            )
        check_block_sayable(config, stored.d2t, self.model.num_layers, self.what)
        config = replace(config, max_positions=max(config.max_positions, self.model.context_length))
        tensors = block_public_tensors(config, stored.tensors, stored.d2t, _output_rows(stored, self.model), self.dtype)
        settings = block_settings(
            config,
            self.number_format,
            target=self.target,
            architectures=self.architectures,
            num_draft_tokens=self.num_draft_tokens,
        )
        return settings[SPECULATORS], settings, tensors

    @property
    def number_format(self) -> str:
        """In a word."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def architectures(self) -> list[str]:
        """Of the target, as its config.json says."""
        return list(find_source(self.target).config().architectures or [])


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(choices)}.")


def _output_rows(stored: StoredHead[HeadConfig], model: Model) -> Tensor:
    """Of the target, for the tokens that the head proposes."""
    ids = torch.arange(stored.config.draft_vocab_size)
    return model.output_rows(ids if stored.d2t is None else ids + stored.d2t).cpu()


def _write(
    out: Path, settings: dict[str, Any], tensors: dict[str, Tensor], speculative: dict[str, Any], card: str
) -> Exported:
    from safetensors.torch import save

    check_room(out, sum(tensor.nbytes for tensor in tensors.values()))
    with (new_files if out.is_dir() else whole_folder)(out, ConfigError) as fresh:
        write_bytes(fresh / WEIGHTS, save(tensors, metadata={"format": "pt"}), error=ConfigError)
        write_json(fresh / CONFIG, settings, error=ConfigError)
        write_json(fresh / SPECULATIVE, speculative, error=ConfigError)
        write_bytes(fresh / CARD, card.encode(), error=ConfigError)
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    remove_former(out, written.keys())
    numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    dtype = str(next(iter(numbers.values())).dtype).removeprefix("torch.")
    count = sum(tensor.numel() for tensor in numbers.values())
    return Exported(count, dtype, sum(written.values()), tuple(sorted(written)))


def _card(head: Path, target: str, speculative: dict[str, Any]) -> str:
    return f"""# {head.name}, for vLLM

The draft head `{head.name}` of the target `{target}`, written by forerun {__version__}. With `{SPECULATIVE}`, whose
`model` is this folder:

```sh
vllm serve TARGET --speculative-config '{json.dumps(speculative)}'
```

The licence is that of `{head.name}`.
"""
