"""Hashes of tokenizers: what changes them, what does not, and the values that files on disk hold."""

from __future__ import annotations

import json

from forerun.config import BUNDLED_INDEX
from forerun.drafters.lookup.rest.index import Index
from forerun.models import load_tokenizer
from forerun.utils.vocabulary import fingerprint, ids_fingerprint


class Letters:
    """A tokenizer as far as a fingerprint looks."""

    def __init__(
        self, vocabulary: dict[str, int] | None = None, merges: list[str] | list[list[str]] | None = None
    ) -> None:
        self.vocabulary = vocabulary or {"a": 0, "b": 1}
        if merges is not None:
            self.backend_tokenizer = self
            self.merges = merges

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def to_str(self) -> str:
        return json.dumps({"truncation": None, "model": {"merges": self.merges}})


def test_fingerprints() -> None:
    plain = fingerprint(Letters())
    assert plain == fingerprint(Letters({"b": 1, "a": 0})) and len(plain) == 32
    merged = fingerprint(Letters(merges=["a b", "ab a"]))
    assert merged == fingerprint(Letters(merges=[["a", "b"], ["ab", "a"]]))
    others = [
        Letters({"a": 1, "b": 0}),
        Letters({"a": 0}),
        Letters({"a": 0, "b": 2}),
        Letters(merges=["ab a", "a b"]),
        None,
    ]
    assert len({plain, merged, *map(fingerprint, others)}) == 7
    assert fingerprint(Letters(merges=[])) == plain


def test_the_fingerprint_does_not_depend_on_settings() -> None:
    tokenizer = load_tokenizer("bundled")
    before = fingerprint(tokenizer)
    tokenizer("a b c", truncation=True, max_length=2)
    assert fingerprint(tokenizer) == before == fingerprint(load_tokenizer("bundled-draft"))


def test_ids_alone() -> None:
    plain = ids_fingerprint(Letters())
    assert plain == ids_fingerprint(Letters({"b": 1, "a": 0})) == ids_fingerprint(Letters(merges=["a b"]))
    assert len({plain, ids_fingerprint(Letters({"a": 1, "b": 0})), ids_fingerprint(None)}) == 3
    assert len(plain) == 64


def test_the_values_in_files_do_not_change() -> None:
    tokenizer = load_tokenizer("bundled")
    assert fingerprint(tokenizer) == Index(BUNDLED_INDEX).header.fingerprint
    assert ids_fingerprint(tokenizer) == "fec23d0c59a81ed52b2025ff37e6024a3235dc3d70cb9ace9d6ed263ae8326ac"
    assert fingerprint(Letters(merges=["a b"])) == "a01e054481e6be0f027db0bde9811db0"
    assert fingerprint(None) == ids_fingerprint(None) == ""
