"""`custom_generate`: the tokens that Transformers generates, greedy and sampled, one prompt and several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from families import make_family
from forerun.errors import SamplingError, UnsupportedModelError
from forerun.integrations.transformers import Speculative

PROMPT = torch.tensor([[5, 9, 5, 9, 5, 7, 5, 9, 5]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    folder = make_family("llama", tmp_path_factory.mktemp("model"))
    return tf.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def speculative() -> Speculative:
    return Speculative("prompt-lookup", num_draft_tokens=3)


def test_greedy(model: Any, speculative: Speculative) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model.generate(PROMPT, max_new_tokens=24, do_sample=False)
    ours = model.generate(PROMPT, max_new_tokens=24, do_sample=False, custom_generate=speculative)
    assert torch.equal(ours, plain) and ours.shape[1] == PROMPT.shape[1] + 24
    assert speculative.generations[0].stats.num_forwards < 24
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # it was copied


def test_a_batch_with_padding_and_ends(model: Any, speculative: Speculative) -> None:
    ids = torch.cat([PROMPT, torch.tensor([[0, 0, 0, 0, 4, 8, 15, 16, 23]])])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    long = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    end = int(long[1, 9 + 6])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    for more in ({"eos_token_id": end}, {"eos_token_id": [end], "min_new_tokens": 9}, {"repetition_penalty": 1.3}):
        plain = model.generate(ids, **options, **more)
        assert torch.equal(model.generate(ids, **options, **more, custom_generate=speculative), plain)
    said = model.generate(ids, **options, custom_generate=speculative, return_dict_in_generate=True)
    assert torch.equal(said.sequences, long)


def test_sampling_follows_torchs_seed(model: Any, speculative: Speculative) -> None:
    def drawn(seed: int, **more: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        found: torch.Tensor = model.generate(
            PROMPT, max_new_tokens=12, do_sample=True, top_k=9, top_p=0.9, num_return_sequences=3, **more
        )
        return found

    first = drawn(1, custom_generate=speculative)
    assert first.shape == (3, PROMPT.shape[1] + 12) and len({tuple(row) for row in first.tolist()}) > 1
    assert torch.equal(first, drawn(1, custom_generate=Speculative(None)))  # whoever drafts
    assert not torch.equal(first, drawn(2, custom_generate=speculative))


def test_changed_weights_are_copied_again(tmp_path: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(make_family("qwen2", tmp_path))
    speculative = Speculative("suffix")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    first = model.generate(PROMPT, **options, custom_generate=speculative)
    copied = speculative._llm
    model.generate(PROMPT, **options, custom_generate=speculative)
    assert speculative._llm is copied
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    second = model.generate(PROMPT, **options, custom_generate=speculative)
    assert torch.equal(second, model.generate(PROMPT, **options)) and not torch.equal(first, second)


class Odd(tf.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "generation mode is beam_search"),
        ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor"),
        ({"logits_processor": tf.LogitsProcessorList([Odd()])}, "logits processor Odd"),
        ({"max_time": 3.0}, "MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}, "padding on the left"),
        ({"position_ids": PROMPT}, "position_ids are not those"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str, model: Any, speculative: Speculative) -> None:
    with pytest.raises(SamplingError, match=reason):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=speculative, **options)


def test_models_that_are_refused(tmp_path: Path, speculative: Speculative) -> None:
    peft = pytest.importorskip("peft")
    model = tf.AutoModelForCausalLM.from_pretrained(make_family("qwen2", tmp_path))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        adapted.generate(input_ids=PROMPT, max_new_tokens=4, custom_generate=speculative)


def test_models_on_several_devices_are_refused(tmp_path: Path, speculative: Speculative) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(make_family("qwen2", tmp_path))
    for name, value in {"_tp_size": 2, "hf_device_map": {"": 0}}.items():
        setattr(model, name, value)
        with pytest.raises(UnsupportedModelError, match=r"several devices.*vLLM"):
            model.generate(input_ids=PROMPT, max_new_tokens=4, custom_generate=speculative)
        setattr(model, name, None)
