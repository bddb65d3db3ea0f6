"""In float64 every family says what Transformers' own `generate` says, token for token, whatever is drafted.

Of the six drafters, two run for each size by default and one for each offset, and the others with the slow tests. Which
ones changes with the family and with the other parameter, so that by default every two of family, drafter, and size or
offset meet.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import References, Scripted, adversaries
from families import FAMILIES, VOCAB
from forerun import LLM, SamplingParams
from forerun.models import Model, load_model, load_tokenizer

NUM_NEW = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)
PROMPTS = [[7, 30, 2], [50], list(range(1, 31)), [90, 0], [20, 21, 22, 23, 24, 25]]
BAD = ["right", "wrong", "random", "duplicated", "tree", "empty"]
Part = tuple[int, int]
"""Which part of the drafters, and of how many."""


def parts(count: int) -> Any:
    """One part of the drafters by default, the others with the slow tests."""
    slow = (pytest.param((part, count), marks=pytest.mark.slow) for part in range(1, count))
    return pytest.mark.parametrize("part", [(0, count), *slow], ids=range(count))


@dataclass
class Family:
    name: str
    model: Model
    tokenizer: Any
    reference: Any  # the Transformers model
    references: References

    def generate(self, prompt: list[int], **options: Any) -> list[int]:
        """Transformers' greedy continuation."""
        ids = torch.tensor([prompt])
        options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_NEW, "pad_token_id": 0}
        with torch.inference_mode():
            out = self.reference.generate(ids, do_sample=False, **options)
        result: list[int] = out[0, len(prompt) :].tolist()
        return result

    def kinds(self, number: int, part: Part) -> list[str]:
        """A part of the drafters; number: a size or an offset."""
        return BAD[(list(FAMILIES).index(self.name) + number + part[0]) % part[1] :: part[1]]

    def llm(self, kind: str, k: int = 4, chunk: int = 256) -> LLM:
        drafter: Scripted = adversaries(self.references, VOCAB)[kind]
        return LLM(self.model, drafter, num_draft_tokens=k, prefill_chunk=chunk, tokenizer=self.tokenizer)


QUICK = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "phi3", "cohere", "mixtral", "gpt_oss")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
)
def family(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Family:
    import transformers

    folder = family_folder(request.param)
    # Soft-capping and attention sinks exist in Transformers' eager form only; Mamba 2 has no other.
    attention = "eager" if request.param in ("gemma2", "gpt_oss", "mamba2") else "sdpa"
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    )
    made = Family(request.param, load_model(folder, "float64"), load_tokenizer(folder), reference.eval(), {})
    made.references = {tuple(prompt): made.generate(prompt) for prompt in PROMPTS}
    return made


def test_the_reference_says_something(family: Family) -> None:
    """Otherwise everything below would be easy."""
    assert len({token for output in family.references.values() for token in output}) >= 7
    assert all(len(output) == NUM_NEW for output in family.references.values())


@pytest.mark.sampled(12)
@parts(3)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_greedy_in_company(family: Family, size: int, part: Part) -> None:
    for kind in family.kinds(size, part):
        llm = family.llm(kind, k=[1, 3, 5, 8, 4][size - 1], chunk=[256, 5, 2, 256, 3][size - 1])
        prompts = PROMPTS[-size:]
        results: Any = llm.generate(prompts, GREEDY)
        for prompt, result in zip(prompts, results):
            assert result.token_ids == family.references[tuple(prompt)], kind
        if kind == "right" and size > 1:
            assert results[0].stats.acceptance_rate == 1


@pytest.mark.sampled(40)
@parts(6)
@pytest.mark.parametrize("offset", range(NUM_NEW))
def test_eos_at_every_offset(family: Family, offset: int, part: Part) -> None:
    prompts = PROMPTS[:3]
    eos = family.references[tuple(prompts[offset % 3])][offset]
    expected = [family.references[tuple(prompt)] for prompt in prompts]
    expected = [output[: output.index(eos) + 1] if eos in output else output for output in expected]
    assert expected[offset % 3] == family.generate(prompts[offset % 3], eos_token_id=eos)
    for kind in family.kinds(offset, part):
        llm = family.llm(kind)
        llm.target.eos_token_ids = frozenset([eos])
        try:
            results: Any = llm.generate(prompts, GREEDY)
        finally:
            llm.target.eos_token_ids = frozenset()
        assert [result.token_ids for result in results] == expected
        assert results[offset % 3].finish_reason == ("stop" if len(expected[offset % 3]) <= NUM_NEW else "length")


@pytest.mark.sampled(32)
@parts(6)
@pytest.mark.parametrize("offset", range(NUM_NEW))
def test_stop_strings_at_every_offset(family: Family, offset: int, part: Part) -> None:
    prompt = PROMPTS[offset % 3]
    text = family.tokenizer.decode(family.references[tuple(prompt)])
    stop = text[offset : offset + 1 + offset % 4]
    # Transformers finds a stop string that begins in the prompt, too: leave the border out of the comparison
    border = family.tokenizer.decode(prompt)[-3:] + text[:3]
    expected = family.generate(prompt, stop_strings=[stop], tokenizer=family.tokenizer) if stop not in border else None
    for kind in family.kinds(offset, part):
        result: Any = family.llm(kind).generate(prompt, replace(GREEDY, stop=[stop]))
        assert expected is None or result.token_ids == expected
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
