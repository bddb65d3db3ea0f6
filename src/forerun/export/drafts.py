"""Draft models that other programs are to run: what must hold before they are written."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import IncompatibleDrafterError
from forerun.models import find_tokenizer
from forerun.models.configuration import OUTPUT_TOKENS
from forerun.models.sources import find_source
from forerun.vocabulary import Vocabulary, check_same_tokens

DRAFT_TOKENS = 3
"""K that is recommended where nothing is said."""


def check_draft(draft: str | Path, target: str | Path, reader: str) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of draft and target, which stand for the same tokens.

    Args:
        reader: who will draft with it, for messages.

    Raises:
        IncompatibleDrafterError: they do not, or the draft proposes a part of its vocabulary only.
        ModelLoadError: one of them cannot be read.
    """
    ours, theirs = _vocabulary(draft), _vocabulary(target)
    source = find_source(draft)
    tokens = source.output_tokens(source.config())
    if tokens is not None:
        raise IncompatibleDrafterError(
            f"{draft} proposes {len(tokens):,} of {ours.size:,} tokens ({OUTPUT_TOKENS} in its configuration): the "
            f"other rows of its output layer were not trained, and {reader} computes all of them. Train a draft "
            "without --output-tokens, or draft with this one in forerun."
        )
    check_same_tokens(theirs, ours)
    return ours, theirs


def _vocabulary(name: str | Path) -> Vocabulary:
    return Vocabulary(str(name), find_source(name).config().vocab_size, find_tokenizer(name))
