from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from families import VOCAB, tiny_model
from forerun.errors import ConfigError
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.evaluate import (
    acceptance_of,
    accepted_chains,
    expected_chains,
    held_out_acceptance,
    lengths_to_end,
    packed_inputs,
    text_score,
    write_on,
)
from tools.lm import build_model, train_tokenizer

from .conftest import TINY


@pytest.fixture
def tokenizer(files: list[SourceFile]):
    return train_tokenizer((file.text for file in files), 320)


def test_windows_score_every_token_once_as_one_long_forward_would(tokenizer) -> None:
    model = build_model(TINY, 0, 0).double().eval()
    text = "def function(value):\n    return value + 1\n" * 3
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.inference_mode():
        nats = F.cross_entropy(model(input_ids=ids[:, :-1]).logits[0].float(), ids[0, 1:], reduction="sum")
    score = text_score(model, tokenizer, [text], window=4096)
    assert score.tokens == ids.shape[1] - 1 and score.bytes == len(text)
    assert score.bits_per_byte == pytest.approx(float(nats) / math.log(2) / len(text), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(float(nats) / score.tokens), rel=1e-5)
    windowed = text_score(model, tokenizer, [text], window=16)
    assert windowed.tokens == score.tokens
    assert windowed.bits_per_byte == pytest.approx(score.bits_per_byte, rel=0.05)


def test_greedy_chains_walk_as_speculation_does() -> None:
    # K = 2: [yes yes] bonus | [no] recovered | [yes no] recovered | one chain more would run over the end
    matches = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert list(accepted_chains(matches.expand(2, -1), 8)) == [(0, 2), (3, 0), (4, 1)]


def test_expected_chains_multiply_overlaps() -> None:
    starts, survived = expected_chains(torch.tensor([0.5, 0.8, 0.25, 1.0]).expand(2, -1))
    assert starts == 2 and survived == pytest.approx([1.3, 0.4 + 0.2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_accepts_everything_of_itself(temperature: float) -> None:
    model = build_model(TINY, 0, 0).float().eval()
    prompts = [list(range(5, 45)), list(range(3, 50)), [7, 8, 9]]
    (same,) = held_out_acceptance(model, model, prompts, temperature=temperature, new_tokens=24)
    assert same.rate == pytest.approx(1.0, abs=1e-4) and same.mean_acceptance_length == pytest.approx(5, abs=1e-3)
    other = copy.deepcopy(model)
    other.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, dims=0))
    assert held_out_acceptance(model, other, prompts, temperature=temperature, new_tokens=24)[0].rate < 0.9


def test_text_counts_up_to_its_end() -> None:
    tokens = torch.tensor([[4, 5, 0, 6, 0], [4, 5, 6, 7, 8], [0, 1, 2, 3, 4]])
    assert lengths_to_end(tokens, 0) == [3, 5, 1]
    assert lengths_to_end(tokens, [0, 5]) == [2, 2, 1]
    assert lengths_to_end(tokens, None) == [5, 5, 5]


def test_continuations_are_greedy() -> None:
    model = build_model(TINY, 0, 0).float().eval()
    prompts = torch.arange(12).view(2, 6) + 3
    tokens = write_on(model, prompts, 5, 0.0, seed=0)
    expected = model.generate(prompts, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gpt2", {}),
        ("opt", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_packed_documents_are_computed_as_if_each_were_alone(family: str, options: dict[str, Any]) -> None:
    """With positions of their own (gpt2, opt), masks that are added (gemma2), and windows of all layers or some."""
    model = tiny_model(family, **options)
    lengths = [9, 2, 7]
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    documents = torch.repeat_interleave(torch.tensor([0, 1, 2, NO_DOCUMENT]), torch.tensor([*lengths, 2]))
    with torch.inference_mode():
        packed = model(**packed_inputs(model, tokens, documents.expand(2, -1)), use_cache=False).logits
        for start, part in zip([0, 9, 11], tokens[:, :18].split(lengths, 1), strict=True):
            alone = model(part, use_cache=False).logits
            torch.testing.assert_close(packed[:, start : start + part.shape[1]], alone, atol=1e-4, rtol=1e-4)


def test_padding_of_parallel_chains_is_no_token() -> None:
    perfect = torch.ones(4, 10).triu()  # row k begins with k columns of padding
    (found,) = acceptance_of([perfect, perfect[:, :7]], 0.0, 4)
    assert found.per_token == found.rate == 1.0 and found.tokens == 17


def test_windows_beside_other_kinds_of_layers_are_refused_where_rows_are_longer() -> None:
    model = tiny_model("llama")
    model.config.sliding_window = 8
    model.config.layer_types = ["conv", "sliding_attention"]
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ConfigError, match="'llama' has layers with a window of 8 tokens beside others"):
        packed_inputs(model, tokens, tokens)
    packed_inputs(model, tokens[:, :8], tokens[:, :8])
