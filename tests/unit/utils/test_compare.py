"""Vocabularies compared id by id."""

from typing import Any

import pytest

from forerun.errors import IncompatibleDrafterError
from forerun.utils.vocabulary import Vocabulary, check_same_tokens


class Words:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def check(target: Any, draft: Any, target_size: int = 4, draft_size: int = 4) -> None:
    check_same_tokens(Vocabulary("target", target_size, target), Vocabulary("draft", draft_size, draft))


def test_padding_is_no_difference() -> None:
    words = Words("a", "b", "</s>")
    check(words, words)
    check(words, words, 4, 64)
    check(words, words, 64, 4)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Words("a", "c", "</s>"), "token 1 is 'b' in the target's vocabulary and 'c' in the draft's"),
        (Words("b", "a", "</s>"), "token 0 is 'a'.*drafter='cross-vocab:model=draft'"),
        (Words("a", "b", "<eos>"), "token 2 is '</s>'"),
        (Words("a", "b"), "token 2 is '</s>' in the target's vocabulary and absent in the draft's"),
        (Words("a", "b", "</s>", "<tool>"), "token 3 is absent in the target's vocabulary and '<tool>'"),
        (None, "has no tokenizer"),
    ],
)
def test_differences_are_named(draft: Any, words: str) -> None:
    with pytest.raises(IncompatibleDrafterError, match=words):
        check(Words("a", "b", "</s>"), draft)


def test_without_tokenizers_the_widths_must_agree() -> None:
    check(None, None)
    with pytest.raises(IncompatibleDrafterError, match="5 token ids"):
        check(None, None, 4, 5)
    with pytest.raises(IncompatibleDrafterError, match="no tokenizer"):
        check(None, Words("a"))


@pytest.mark.parametrize(("target_size", "draft_size"), [(4, 64), (64, 4), (64, 128), (3, 3)])
def test_padding_hides_no_difference(target_size: int, draft_size: int) -> None:
    """Whatever the widths: the same words pass, others do not, and words that stand in the other's padding neither."""
    words = Words("a", "b", "</s>")
    assert check(words, words, target_size, draft_size) is None  # type: ignore[func-returns-value]
    for other in (Words("a", "c", "</s>"), Words("a", "b"), Words("a", "b", "</s>", "<tool>")):
        for pair in ((words, other), (other, words)):
            with pytest.raises(IncompatibleDrafterError, match="cannot draft for"):
                check(*pair, target_size, draft_size)
