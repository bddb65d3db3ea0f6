"""Every drafter of the table against plain decoding on the bundled pair: the same tokens, and the same bits.

Whatever K is, fixed or chosen step by step: losslessness does not depend on it. The prompts say everything three
times, so that look-ups find something, and every rung says how much was drafted and accepted: a rung on which nothing
is accepted tests nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from drafter_rows import TWINS, rows
from forerun import LLM, SamplingParams
from forerun.config import QUANTISATIONS
from forerun.drafters import DRAFTERS
from forerun.models import Model, load_model, load_tokenizer
from forerun.utils import workloads
from heads import text_of

NUM_NEW, NUM_ENDS = 12, 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
K = 6
DEFAULTS = (K, "auto")
SPECS = {"early-exit": "early-exit:exit_layer=12"}
"""Options without which a drafter is hardly ever right: by default a quarter of the bundled target's layers draft."""
ROWS, FEWER_ROWS = rows(), rows(slow=TWINS)


class Rig:
    """The bundled target in one number format, short prompts that repeat, and what plain decoding says."""

    def __init__(self, dtype: str, quantize: str | None = None) -> None:
        self.target: Model = load_model("bundled", dtype, quantize=quantize)
        self.tokenizer: Any = load_tokenizer("bundled")
        cases = workloads.load_workload("code", 5)
        self.prompts = [self.tokenizer(case.prompt)["input_ids"][-20 - 3 * i :] * 3 for i, case in enumerate(cases)]
        self.expected: list[list[int]] = [
            result.token_ids for result in self.llm(None, 0).generate(self.prompts, GREEDY)
        ]

    def llm(self, drafter: str | None, k: Any, **options: Any) -> LLM:
        spec = drafter and SPECS.get(drafter, text_of(drafter))
        return LLM(self.target, spec, num_draft_tokens=k, tokenizer=self.tokenizer, seed=1, **options)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig("float64")


def predicted(drafter: str, params: SamplingParams, output: list[int]) -> SamplingParams:
    """For the drafter that reads one the request with a prediction, which is wrong in its middle."""
    middle = len(output) // 2
    return (
        replace(params, prediction=[*output[:middle], 7, *output[middle + 1 :]]) if drafter == "prediction" else params
    )


def tally(results: Any, least: int) -> None:
    """Say how much was drafted and accepted, and insist on a floor."""
    stats = [choice.stats for result in results for choice in result.choices]
    drafted, accepted = (
        sum(getattr(own, name) for own in stats) for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    print(f"drafted {drafted}, accepted {accepted}")
    assert accepted >= least, f"drafted {drafted}, accepted {accepted}"


def one_of_both(drafter: str, number: int) -> Any:
    """A fixed K for one half of the drafters, auto for the other; which half changes with the number."""
    return DEFAULTS[(list(DRAFTERS).index(drafter) + number) % 2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafter", FEWER_ROWS)
def test_float64_tokens_in_company(rig: Rig, drafter: str) -> None:
    """Greedy, alone and in company, prompts in chunks of several sizes."""
    every: list[Any] = []
    for size, k, chunk in ((1, one_of_both(drafter, 1), 256), (4, one_of_both(drafter, 0), 17)):
        llm = rig.llm(drafter, k, prefill_chunk=chunk)
        params = [predicted(drafter, GREEDY, output) for output in rig.expected[:size]]
        results: Any = llm.generate(rig.prompts[:size], params)
        assert [result.token_ids for result in results] == rig.expected[:size]
        every += results
    seldom_right = ("medusa", "mtp", "rest")  # what is fitted by least squares, and a small index
    # the matrix of recycling begins empty
    tally(every, 2 if drafter == "recycling" else 4 if drafter in seldom_right else 6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafter", FEWER_ROWS)
def test_float64_end_at_every_offset(rig: Rig, drafter: str) -> None:
    """Every token of the output in turn ends it, inside accepted drafts too: all offsets are one batch."""
    prompt, output = rig.prompts[0], rig.expected[0][:NUM_ENDS]
    params = [SamplingParams(temperature=0, max_tokens=NUM_NEW, stop_token_ids=[token]) for token in output]
    params = [predicted(drafter, own, output) for own in params]
    results: Any = rig.llm(drafter, K).generate([prompt] * NUM_ENDS, params)
    tally(results, 2 if drafter == "recycling" else 6)
    for token, result in zip(output, results):
        assert result.token_ids == output[: output.index(token) + 1]
        assert result.finish_reason == "stop"


def mixed(rig: Rig, count: int, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Seeded requests with options of all kinds."""
    rng = random.Random(0)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1, "temperature": 0.9},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logit_bias": {3: 2.0, 5: -4.0}, "min_tokens": 4},
        {"n": 2},
        {"temperature": 0, "logprobs": 1},
    ]
    prompts = []
    for _ in range(count):
        base = rng.choice(rig.prompts)
        start = rng.randrange(len(base) // 3)
        prompts.append(base[start : start + rng.choice((rng.randint(4, 40), len(base) // 2, len(base)))])
    params = [SamplingParams(seed=i, max_tokens=max_tokens, **options[i % len(options)]) for i in range(count)]
    return prompts, params


def choices(llm: LLM, prompts: Any, params: list[SamplingParams], least: int = 0) -> list[Any]:
    results: Any = llm.generate(prompts, params)
    tally(results, least)
    return [(own.token_ids, own.logprobs, own.finish_reason) for result in results for own in result.choices]


@lru_cache(maxsize=1)
def plain_choices(rig: Rig, count: int, max_tokens: int) -> tuple[list[Any], list[list[int]]]:
    """What plain decoding says to the mixed requests: all choices as of `choices`, and the tokens of each first one."""
    results: Any = rig.llm(None, 0).generate(*mixed(rig, count, max_tokens))
    every = [(own.token_ids, own.logprobs, own.finish_reason) for result in results for own in result.choices]
    return every, [result.token_ids for result in results]


def compare_seeded(rig: Rig, drafter: str, count: int, max_tokens: int, ks: Any, least: int) -> None:
    """least: tokens accepted at every fixed K."""
    prompts, params = mixed(rig, count, max_tokens)
    expected, outputs = plain_choices(rig, count, max_tokens)
    if drafter == "prediction":
        params = [predicted(drafter, own, output) for own, output in zip(params, outputs, strict=True)]
    for k in ks:
        assert choices(rig.llm(drafter, k), prompts, params, 0 if k == "auto" else least) == expected, k


@pytest.fixture(scope="module")
def float32() -> Rig:
    return Rig("float32")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafter", FEWER_ROWS)
def test_seeded_requests(float32: Rig, drafter: str) -> None:
    compare_seeded(float32, drafter, 10, 10, [K], 3 if drafter == "medusa" else 6)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ROWS)
def test_a_hundred_seeded_requests(float32: Rig, drafter: str) -> None:
    compare_seeded(float32, drafter, 100, 24, [4, 11, "auto"], 30 if drafter == "medusa" else 60)


Bits = list[tuple[list[int], list[float]]]


def bits(
    llm: LLM, prompts: list[list[int]], batch: int, num_tokens: int, least: int = 0, told: Bits | None = None
) -> Bits:
    """Tokens and log-probabilities, `batch` prompts in company at a time.

    least: tokens accepted at least. told: what the drafter that reads predictions is told of the output.
    """
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    every = [params] * len(prompts)
    if told is not None:
        every = [predicted("prediction", params, output) for output, _ in told]
    found, results = [], []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        made: Any = llm.generate(some, every[start : start + len(some)])
        found += [(result.token_ids, [entry.logprob for entry in result.logprobs]) for result in made]
        results += made
    tally(results, least)
    return found


@lru_cache(maxsize=1)
def plain_bits(rig: Rig, count: int, num_tokens: int) -> Bits:
    """What plain decoding says to the first prompts, one at a time."""
    return bits(rig.llm(None, 0), rig.prompts[:count], 1, num_tokens)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "int4"])
def exact(request: pytest.FixtureRequest) -> Rig:
    return Rig("bfloat16", request.param) if request.param in QUANTISATIONS else Rig(request.param)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("drafter", FEWER_ROWS)
def test_bits(exact: Rig, drafter: str) -> None:
    assert exact.target.exactness.exact, exact.target.exactness.reason
    expected = plain_bits(exact, 2, 10)
    told = expected if drafter == "prediction" else None
    assert bits(exact.llm(drafter, K), exact.prompts[:2], 2, 10, 4, told) == expected


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ROWS)
def test_bits_at_length(exact: Rig, drafter: str) -> None:
    """Prompts that end just before a block of keys does, so that every run crosses into the next."""
    long = [exact.tokenizer(case.prompt)["input_ids"] * 3 for case in workloads.load_workload("code", 8)]
    prompts = [ids[: 240 + 3 * i] for i, ids in enumerate(long)]
    expected = bits(exact.llm(None, 0), prompts, 1, 48)
    told = expected if drafter == "prediction" else None
    for k, batch in ((1, 4), (5, 1), (16, 4), ("auto", 1), ("auto", 4)):
        least = 0 if k == "auto" else 8
        assert bits(exact.llm(drafter, k), prompts, batch, 48, least, told) == expected, (k, batch)
