from __future__ import annotations

import random

import numpy as np
import pytest

from forerun.train.corpus import SourceFile
from tools.lm import train_tokenizer
from tools.text import (
    EpochTexts,
    TwoStageStream,
    Windows,
    defined_names,
    name_pool,
    renamed_throughout,
    with_copies,
)


def test_windows_cover_the_tokens_once_before_any_comes_again() -> None:
    windows = Windows(np.arange(101, dtype=np.uint16), 10, seed=1)
    first = windows.batch(0, 10)
    assert sorted(first[:, :-1].flatten().tolist()) == list(range(100))
    assert (first[:, 1:] - first[:, :-1] == 1).all()
    assert (windows.batch(10, 3) == first[:3]).all()


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        Windows(np.arange(10, dtype=np.uint16), 10, seed=1)


def test_copies_repeat_what_was_there() -> None:
    lines = [f"line_{index} = call({index})" for index in range(60)]
    text = with_copies("\n".join(lines), random.Random(5))
    after = text.split("\n")
    assert len(after) > len(lines)
    assert sum(after.count(line) - 1 for line in lines if line in after) >= 3
    assert with_copies("too short", random.Random(5)) == "too short"
    assert with_copies("\n".join(lines), random.Random(5)) == text


def test_names_are_replaced_throughout_and_builtins_kept() -> None:
    text = "\n".join(f"def function_{n}(self):\n    value_{n} = len(self)\n    return value_{n}" for n in range(20))
    assert "self" not in defined_names(text) and len(defined_names(text)) == 40
    changed = renamed_throughout(text, random.Random(2), ["other"])
    gone = [name for name in defined_names(text) if name not in changed]
    assert 0 < len(gone) <= 20 and changed.count("len(self)") == 20
    assert name_pool([text, "class Other: pass"]) == sorted({*defined_names(text), "Other"})


def test_every_epoch_has_copies_and_an_order_of_its_own(files: list[SourceFile]) -> None:
    texts = EpochTexts.make(list(reversed(files)), 1, copy_share=0.5, rename_share=0.5)
    assert texts.of(3) == EpochTexts.make(files, 1, 0.5, 0.5).of(3)
    assert texts.of(3) != texts.of(4) and sorted(texts.of(3)) != sorted(texts.of(4))
    plain = EpochTexts.make(files, 1, 0.0, 0.0)
    assert plain.of(0) != plain.of(1) and sorted(plain.of(0)) == sorted(file.text for file in files)


def test_windows_are_short_first_and_epochs_differ(files: list[SourceFile]) -> None:
    tokenizer = train_tokenizer((file.text for file in files), 300)
    texts = EpochTexts.make(files, 1, 0.5, 0.0)
    stream = TwoStageStream(texts, tokenizer, (16, 32), 0.25, 128)
    per_epoch = stream.tokens_per_epoch // 128
    assert stream.batch(0, 4 * per_epoch).shape == (8, 17)
    assert stream.batch(4 * per_epoch - 1, 4 * per_epoch).shape == (4, 33)
    first = stream.batch(0, 4 * per_epoch)
    assert not np.array_equal(first, stream.batch(per_epoch, 4 * per_epoch))
    assert np.array_equal(first, stream.batch(0, 4 * per_epoch))
