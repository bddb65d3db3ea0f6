"""Merges of byte-pair encodings: read and checked, or derived from the scores of a SentencePiece vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from forerun.gguf_format.token_list import PREFIX, TokenList, TokenType

MERGES = PREFIX + "merges"
SCORES = PREFIX + "scores"


def read_merges(tokens: TokenList) -> list[tuple[str, str]]:
    """The merges of the metadata, first before second; of several of the same pair the first counts.

    Raises:
        ModelLoadError: there are none, or one of them does not join two tokens to a third.
    """
    merges: dict[tuple[str, str], None] = {}
    for place, merge in enumerate(tokens.fields.list_of(MERGES, str)):
        border = merge.find(" ", 1)
        left, right = merge[:border], merge[border + 1 :]
        if border < 0 or left not in tokens.ids or right not in tokens.ids or left + right not in tokens.ids:
            raise tokens.wrong(MERGES, f"merge {place} does not join two tokens of the vocabulary to a third")
        merges[left, right] = None
    return list(merges)


def merges_of_scores(tokens: TokenList) -> list[tuple[str, str]]:
    """The merges that give what merging by score gives: of all neighbours the pair whose token has the highest score.

    SentencePiece merges any two neighbours whose joined text is a token; a merge here is such a pair, ranked by the
    score. Equal scores would leave the order to the place in the text, which ranks cannot say, so they are refused.
    Where one token can be joined from several pairs, the shorter left part goes first.

    Raises:
        ModelLoadError: there is not one finite score for each token, or two tokens that can be merged have the same.
    """
    scores = tokens.fields.list_of(SCORES, float)
    if len(scores) != len(tokens.texts):
        raise tokens.wrong(SCORES, f"it has {len(scores):,} entries, but there are {len(tokens.texts):,} tokens")
    ranked = sorted(_joined(tokens), key=lambda index: -scores[index])
    for first, second in pairwise(ranked):
        if scores[first] == scores[second]:
            raise tokens.wrong(SCORES, f"tokens {first} and {second} have the same score, so no merge of them is first")
    return [pair for index in ranked for pair in _pairs(tokens.texts[index], tokens.ids)]


def _joined(tokens: TokenList) -> list[int]:
    """The tokens that two others make. Control tokens are cut from the text before any merge."""
    whole = (TokenType.CONTROL, TokenType.UNKNOWN)
    return [
        index
        for index, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind not in whole and _pairs(text, tokens.ids)
    ]


def _pairs(text: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    parts = ((text[:border], text[border:]) for border in range(1, len(text)))
    return [(left, right) for left, right in parts if left in ids and right in ids]
