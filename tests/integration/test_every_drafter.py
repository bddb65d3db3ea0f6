"""Every drafter of the table with every sampling option, on the bundled pair: the output is that of plain decoding.

A short prompt with every option, and two long ones, greedy and drawn, that cross into the next block of keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drafter_rows import rows
from forerun import LLM, Grammar, SamplingParams
from forerun.drafters import DRAFTERS
from forerun.kernels.cpu import native
from forerun.kernels.partition import KV_BLOCK
from forerun.utils import workloads
from heads import text_of

FORM = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["class", "def"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
)
GREEDY: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "logit bias": {"logit_bias": {5: 4.0, 9: -3.0}},
    "stop string": {"stop": ["self", "\n\n"]},
    "min_tokens": {"stop": ["\n"], "min_tokens": 7},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "grammar": {"grammar": FORM},
}
DRAWN: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "several choices": {"n": 3},
    "grammar": {"grammar": FORM, "n": 2},
    "all at once": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 1.0},
        "logprobs": 1,
        "grammar": FORM,
    },
}
NUM_NEW, K = 12, 10
CASES = [
    *((name, SamplingParams(temperature=0, max_tokens=NUM_NEW, **options)) for name, options in GREEDY.items()),
    *((name, SamplingParams(**{"seed": 3, "max_tokens": NUM_NEW, **options})) for name, options in DRAWN.items()),
]
CROSSING = ("nothing else", "temperature")
"""The cases that get the long prompt too, which ends eight tokens before a block of keys does."""
Request = tuple[str, list[int], SamplingParams]


@pytest.fixture(scope="module", params=["auto", "int8"])
def plain(request: pytest.FixtureRequest) -> LLM:
    if request.param != "auto" and native() is None:
        pytest.skip("there are no native kernels here")
    return LLM("bundled", None, dtype="bfloat16", kv_cache_dtype=request.param)


@pytest.fixture(scope="module")
def requests(plain: LLM) -> list[Request]:
    """Name of the case, prompt, parameters."""
    assert plain.tokenizer is not None
    every: Any = [plain.tokenizer(case.prompt)["input_ids"] for case in workloads.load_workload("code", 4)]
    one, other, *_, long = sorted(every, key=len)
    assert len(long) >= KV_BLOCK
    made = [(name, (one, other)[number % 2], params) for number, (name, params) in enumerate(CASES)]
    return made + [(name, long[: KV_BLOCK - 8], params) for name, params in CASES if name in CROSSING]


@pytest.fixture(scope="module")
def expected(plain: LLM, requests: list[Request]) -> list[Any]:
    """What plain decoding says: all options together, in one batch."""
    return plain.generate([prompt for _, prompt, _ in requests], [params for *_, params in requests])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("drafter", rows())
def test_the_output_is_that_of_plain_decoding(
    plain: LLM, requests: list[Request], expected: list[Any], drafter: str
) -> None:
    llm = LLM(plain.target, text_of(drafter), num_draft_tokens=K, tokenizer=plain.tokenizer)
    every = [params for *_, params in requests]
    assert llm.drafter is not None
    if llm.drafter.traits.reads_prediction:
        every = [_predicted(params, reference) for params, reference in zip(every, expected, strict=True)]
    results = llm.generate([prompt for _, prompt, _ in requests], every)
    accepted = 0
    for (name, *_), result, reference in zip(requests, results, expected, strict=True):
        assert result.prompt_logprobs == reference.prompt_logprobs, name
        for own, other in zip(result.choices, reference.choices, strict=True):
            assert (own.text, own.finish_reason) == (other.text, other.finish_reason), name
            assert (own.token_ids, own.logprobs) == (other.token_ids, other.logprobs), name
            accepted += own.stats.num_accepted_tokens
    assert accepted > 0 or DRAFTERS[drafter].may_be_silent, (
        f"No token of {drafter} was accepted on the bundled prompts: it drafts nothing, or what is wrong. If these "
        "prompts rightly give it nothing to draft from, say so in its row of the table: may_be_silent=True."
    )


def _predicted(params: SamplingParams, reference: Any) -> SamplingParams:
    """The same request with a prediction that is right but for its middle."""
    token_ids = reference.choices[0].token_ids
    middle = len(token_ids) // 2
    return replace(params, prediction=[*token_ids[:middle], 7, *token_ids[middle + 2 :]])
