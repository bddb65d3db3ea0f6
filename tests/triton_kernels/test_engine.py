"""The whole engine by the Triton kernels: the same tokens and log-probabilities with a drafter and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

pytest.importorskip("triton")

from forerun import LLM, SamplingParams
from forerun.config import KERNELS_VARIABLE
from forerun.models import Model, load_model
from triton_rig import DEVICE, DTYPES, MARKS

pytestmark = MARKS
VOCAB = 48
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8] * 3, [9, 8, 7, 6, 5] * 4, [11, 12] * 31]
Bits = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a Llama of one layer whose greedy text repeats itself, so that n-gram drafts are accepted."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)
    path = tmp_path_factory.mktemp("looping")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def target(request: pytest.FixtureRequest, folder: Path) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNELS_VARIABLE, "triton")
        return load_model(folder, str(request.param).removeprefix("torch."), device=DEVICE)


def bits(llm: LLM, params: SamplingParams) -> tuple[Bits, int]:
    """Return tokens and log-probabilities of each prompt, all in one batch, and the number of accepted tokens."""
    generations = llm.generate(PROMPTS, params)
    found = [
        (each.token_ids, [entry.logprob for entry in each.logprobs])
        for each in generations
        if each.logprobs is not None
    ]
    assert len(found) == len(PROMPTS)
    return found, sum(each.stats.num_accepted_tokens for each in generations)


def test_the_self_test_finds_it_exact(target: Model) -> None:
    assert target.kernels == "triton"
    assert target.exactness.exact, target.exactness.reason


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
def test_drafters_change_no_bit(target: Model, folder: Path, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    drawn = {"temperature": 0.0} if seed is None else {"temperature": 0.7, "seed": seed}
    params = SamplingParams(**drawn, max_tokens=10, ignore_eos=True, logprobs=0)
    expected, _ = bits(LLM(target, None), params)
    accepted = {}
    for name in ("prompt-lookup", "suffix", f"draft-model:model={folder}", f"draft-tree:model={folder},width=2"):
        found, accepted[name] = bits(LLM(target, name, num_draft_tokens=4), params)
        assert found == expected, name
    if seed is None:
        assert all(accepted.values()), accepted
    assert len({tuple(tokens) for tokens, _ in expected}) > 1
