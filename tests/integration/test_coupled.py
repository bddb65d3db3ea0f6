"""A request with a seed gets the same tokens whatever drafts for it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, DraftModel, PromptLookup, SamplingParams
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.models import load_model, load_tokenizer


def requests(count: int, vocab_size: int, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of all lengths, options of all kinds; every request has its seed, some have several choices."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))] for _ in range(count)]
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
    ]
    params = [SamplingParams(seed=i, max_tokens=max_tokens, **options[i % len(options)]) for i in range(count)]
    return prompts, params


def outputs(llm: LLM, prompts: Any, params: list[SamplingParams]) -> tuple[list[list[int]], float]:
    """Tokens of all choices of all requests, and the acceptance rate."""
    results: Any = llm.generate(prompts, params)
    choices = [choice for result in results for choice in result.choices]
    drafted = sum(choice.stats.num_draft_tokens for choice in choices)
    accepted = sum(choice.stats.num_accepted_tokens for choice in choices)
    return [choice.token_ids for choice in choices], accepted / max(drafted, 1)


@pytest.fixture(scope="module")
def draft_folder(family_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: right often, not always."""
    import transformers

    folder = tmp_path_factory.mktemp("draft")
    model = transformers.AutoModelForCausalLM.from_pretrained(family_folder("llama"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder)
    load_tokenizer(family_folder("llama")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("float32", 60), *(pytest.param(dtype, 200, marks=pytest.mark.slow) for dtype in ("float32", "float64"))],
)
def test_seeded_requests(family_folder: Callable[[str], Path], draft_folder: Path, dtype: str, number: int) -> None:
    folder = family_folder("llama")
    target, tokenizer = load_model(folder, dtype), load_tokenizer(folder)
    prompts, params = requests(number, target.vocab_size, 16)
    plain, _ = outputs(LLM(target, None, tokenizer=tokenizer), prompts, params)
    rates = {}
    for name, drafter, options in (
        ("prompt lookup", PromptLookup(min_ngram=1), {"num_draft_tokens": 4}),
        ("draft model", DraftModel(draft_folder), {"num_draft_tokens": 4}),
        ("automatic", DraftModel(draft_folder), {}),
        ("another K", DraftModel(draft_folder), {"num_draft_tokens": 7, "max_batch": 3, "prefill_chunk": 4}),
        ("another rule asked for", DraftModel(draft_folder), {"acceptance": "block"}),
    ):
        llm = LLM(target, drafter, tokenizer=tokenizer, **options)  # type: ignore[arg-type]
        count = 30 if name == "another K" else number  # its small batches and chunks take many forwards
        tokens, rates[name] = outputs(llm, prompts[:count], params[:count])
        assert tokens == plain[: len(tokens)], name
    assert rates["prompt lookup"] > 0.001
    assert rates["draft model"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_seeded_requests_of_the_bundled_pair(dtype: str) -> None:
    target, tokenizer = load_model(BUNDLED_TARGET, dtype), load_tokenizer(BUNDLED_TARGET)
    assert target.exactness.exact
    prompts, params = requests(200, target.vocab_size, 24)
    texts = ["def parse(text):\n    ", "import os\n", "class Node:\n    def __init__(self, "]
    prompts = [tokenizer(texts[i % 3])["input_ids"] if i % 2 else prompt for i, prompt in enumerate(prompts)]
    plain, _ = outputs(LLM(target, None, tokenizer=tokenizer), prompts, params)
    for drafter, k in ((PromptLookup(), 4), (DraftModel(BUNDLED_DRAFT), 4), (DraftModel(BUNDLED_DRAFT), 2)):
        tokens, rate = outputs(LLM(target, drafter, num_draft_tokens=k, tokenizer=tokenizer), prompts, params)
        assert tokens == plain
        assert rate > 0
