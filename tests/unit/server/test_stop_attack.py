"""Many long stop strings that begin like the answer, beside another client's stream."""

from __future__ import annotations

import pytest

from attacks import beside, first_piece
from forerun import LLM, SamplingParams
from serving import serving

PROMPT = "def f(x):\n"


@pytest.mark.slow
def test_long_stop_strings_do_not_hold_up_a_stream() -> None:
    llm = LLM("bundled", drafter=None)
    text = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)).text[:399]
    assert len(text) == 399
    stops = [text + "\0", *(text[:200] + f"{number:0200}" for number in range(255))]
    attack = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stop": stops, "temperature": 0.001, "n": 16}
    with serving(llm) as served:
        first_piece(served.url)
        seen = beside(served, attack)
        assert seen.status == 200
        assert max(seen.gap, seen.step) <= 0.3
        assert beside(served, attack | {"stop": [text * 1000]}).status == 400
