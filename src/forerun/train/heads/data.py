"""Packed rows for the training of a head, from whatever holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from forerun.errors import ConfigError
from forerun.heads.fingerprint import target_fingerprint
from forerun.models import LanguageModel, find_tokenizer
from forerun.train.data.answer_rows import pack_answers
from forerun.train.data.packed import INDEX, PackedRows
from forerun.vocabulary.fingerprint import fingerprint


def tokenizer_of(target: str) -> Any:
    """Raises ConfigError where the target has none."""
    tokenizer = find_tokenizer(target)
    if tokenizer is None:
        raise ConfigError(f"{target} has no tokenizer, by which text becomes tokens. Give the folder of a whole model.")
    return tokenizer


def read_rows(
    data: Path, served: LanguageModel, tokenizer: Any, packed: Path, window: int, console: Console
) -> PackedRows:
    """A folder of packed rows as it is; files of answers, texts and folders of them are packed first.

    Args:
        packed: the folder for rows that are packed here, which are taken again if they are of the same data.
        window: tokens of such a row.

    Raises:
        ConfigError: nothing usable is there, or it is of another tokenizer.
    """
    if not (data / INDEX).is_file():
        return pack_answers(
            data,
            tokenizer,
            packed,
            name=served.name,
            vocab_size=served.vocab_size,
            window=window,
            target=target_fingerprint(served),
            told=lambda line: console.print(line, highlight=False),
        )
    rows = PackedRows(data)
    of_rows, of_target = rows.made_from.get("tokenizer"), fingerprint(tokenizer)
    if of_rows != of_target or rows.vocab_size != served.vocab_size:
        raise ConfigError(
            f"{data} was packed with another tokenizer than that of {served.name}: fingerprint {of_rows} and "
            f"{rows.vocab_size:,} tokens, not {of_target} and {served.vocab_size:,}. Pack the answers anew."
        )
    return rows
