"""Tiny random models of every family, with a tokenizer, saved as ordinary folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from families import VOCAB, make_family


def tiny_tokenizer() -> Any:
    """Letters, and pairs of letters, so that stop strings lie across token borders."""
    import transformers
    from tokenizers import Tokenizer, decoders, models

    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in "aeiou"][: VOCAB - len(letters)]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


VARIED: dict[str, dict[str, Any]] = {"minicpm3": {"scale_emb": 2}, "nanochat": {"seed": 1}}
"""Options of families that would otherwise say one token again and again."""


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name -> folder, built once."""
    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = make_family(family, tmp_path_factory.mktemp("families"), **VARIED.get(family, {}))
            tiny_tokenizer().save_pretrained(built[family])
        return built[family]

    return folder
