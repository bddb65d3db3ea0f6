"""Engines that are compared with each other."""

from forerun import LLM, SamplingParams
from forerun.lab.bench.methods import beside


def test_no_method_finds_a_prompt_that_another_has_computed() -> None:
    plain = LLM("bundled", None, prefix_reuse="off")
    other = beside(plain, "suffix", 2)
    tokens, params = list(range(100)), SamplingParams(temperature=0, max_tokens=2)
    for llm in (plain, other, plain, other):
        assert llm.generate(tokens, params).stats.num_cached_tokens == 0
