"""A draft model as a folder that vLLM loads, with the speculative configuration to start it by."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.export.drafts import DRAFT_TOKENS, check_draft
from forerun.export.hf import export_hf
from forerun.export.vllm import CARD, SPECULATIVE, ExportedForVllm, vllm_card
from forerun.files.write import write_bytes, write_json

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
