from __future__ import annotations

import random

import numpy as np
import pytest

from forerun.train.augment import with_copies
from forerun.train.stream import Windows


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
