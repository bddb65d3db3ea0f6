"""Merges of byte-pair encodings: read and checked, or derived from the scores of a SentencePiece vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from forerun.gguf_format.token_list import PREFIX, TOKENS, TokenList

MERGES = PREFIX + "merges"
SCORES = PREFIX + "scores"
MAX_PIECE = 512
"""Characters of a token whose ways to be merged are looked for; that takes the square of its length."""


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

    SentencePiece merges any two neighbours whose joined text is a token, the leftmost of equal scores. A merge here is
    such a pair, ranked by the score, then by the length of its left part: so of runs of one character, which have equal
    scores in Llama's vocabulary, the leftmost grows first, as it should. Between other tokens of equal scores ranks
    cannot say "leftmost", so they are refused. They cannot say it either where two pairs that make the same token
    overlap (`ab aba ba`, both `ababa`); there the longer left part wins.

    Raises:
        ModelLoadError: there is not one finite score for each token, or tokens that can be merged have the same.
    """
    long = next((index for index, text in enumerate(tokens.texts) if len(text) > MAX_PIECE), None)
    if long is not None:
        raise tokens.wrong(TOKENS, f"token {long} is longer than {MAX_PIECE} characters")
    scores = tokens.fields.list_of(SCORES, float)
    if len(scores) != len(tokens.texts):
        raise tokens.wrong(SCORES, f"it has {len(scores):,} entries, but there are {len(tokens.texts):,} tokens")
    pairs = {index: found for index, text in enumerate(tokens.texts) if (found := _pairs(text, tokens.ids))}
    by_score = sorted(pairs, key=lambda index: -scores[index])
    for first, second in pairwise(by_score):
        if scores[first] == scores[second] and len({*tokens.texts[first], *tokens.texts[second]}) > 1:
            raise tokens.wrong(SCORES, f"tokens {first} and {second} have the same score, so no merge of them is first")
    merges = [(-scores[index], -len(left), left, right) for index, found in pairs.items() for left, right in found]
    return [(left, right) for _, _, left, right in sorted(merges)]


def _pairs(text: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The ways to make a token of two others."""
    parts = ((text[:border], text[border:]) for border in range(1, len(text)))
    return [(left, right) for left, right in parts if left in ids and right in ids]
