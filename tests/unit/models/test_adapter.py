"""LoRA adapters: merged, they compute what PEFT computes unmerged; what does not fit is refused with its reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from families import VOCAB, make_family
from forerun import LLM, SamplingParams
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.export.transformers import export_hf
from forerun.models import Rows, identity, load_model, load_transformers_model
from small_tokenizers import byte_level, sentence_piece

PROMPT = [5, 17, 3, 88, 41, 2, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LLAMA = ["q_proj", "v_proj", "down_proj"]


def make_adapter(model: Path, out: Path, **settings: Any) -> Any:
    """Save a random adapter of the model; the model with it, not merged."""
    torch.manual_seed(1)
    base = tf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": LLAMA} | settings))
    wrapped = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1.3)
            elif "lora_" in name:
                parameter.normal_(0, 0.2)
    wrapped.save_pretrained(out)
    return wrapped.eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("adapters") / "lora"
    return out, make_adapter(llama, out)


@pytest.fixture
def adapter(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """Return a copy that a test may change."""
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def served(name: Path, adapter: Path, dtype: str = "float32") -> torch.Tensor:
    """Return the logits that forerun computes."""
    model = load_model(name, dtype, adapter=adapter)
    return model.forward([Rows(model.new_cache(), PROMPT)]).logits


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
        {"use_dora": True},
        {"target_modules": "all-linear"},
        {"target_modules": ["lm_head", "embed_tokens", "o_proj"]},
        {"layers_to_transform": [1], "init_lora_weights": "gaussian"},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_merged_logits_are_those_of_peft_unmerged(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    wrapped = make_adapter(llama, tmp_path / "a", **settings)
    expected = logits(wrapped)
    torch.testing.assert_close(served(llama, tmp_path / "a"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(logits(tf.AutoModelForCausalLM.from_pretrained(llama)), expected, atol=0.1)


def test_other_families_are_merged_too(tmp_path: Path) -> None:
    model = make_family("gpt2", tmp_path)  # its layers keep their weights transposed
    wrapped = make_adapter(model, tmp_path / "a", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    torch.testing.assert_close(served(model, tmp_path / "a"), logits(wrapped), rtol=0, atol=1e-5)


def test_the_sum_is_rounded_once(llama: Path, saved: tuple[Path, Any]) -> None:
    merged = load_transformers_model(llama, "float32", saved[0])
    rounded = load_transformers_model(llama, "bfloat16", saved[0])
    assert rounded.dtype == torch.bfloat16
    for (name, exact), (_, served) in zip(merged.named_parameters(), rounded.named_parameters(), strict=True):
        assert torch.equal(exact.to(torch.bfloat16), served), name
    assert rounded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_an_export_holds_the_merged_weights(llama: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    export_hf(llama, tmp_path / "out", "float32", adapter=saved[0])
    exported = load_model(tmp_path / "out", "float32")
    alone = exported.forward([Rows(exported.new_cache(), PROMPT)]).logits
    assert torch.equal(alone, served(llama, saved[0]))


def test_the_base_model_drafts_for_its_own_fine_tune(llama: Path, saved: tuple[Path, Any]) -> None:
    plain = LLM(llama, None, dtype="float32", adapter=saved[0])
    drafted = LLM(llama, drafter=f"draft-model:model={llama},num_draft_tokens=4", dtype="float32", adapter=saved[0])
    assert plain.exact
    expected, got = (llm.generate(PROMPT, GREEDY) for llm in (plain, drafted))
    assert got.token_ids == expected.token_ids
    assert got.token_ids != LLM(llama, None, dtype="float32").generate(PROMPT, GREEDY).token_ids
    assert got.stats.num_draft_tokens > 0


def test_an_adapter_is_part_of_a_models_identity(llama: Path, saved: tuple[Path, Any]) -> None:
    base, merged = load_model(llama), load_model(llama, adapter=saved[0])
    assert identity(base) != identity(merged)
    assert base.name == merged.name and str(saved[0]) in identity(merged)


def test_the_tokenizer_beside_an_adapter_is_taken_if_its_tokens_are_the_models(adapter: Path, tmp_path: Path) -> None:
    from forerun.models import find_tokenizer

    base = tmp_path / "base"
    base.mkdir()
    tokenizer = sentence_piece()
    tokenizer.save_pretrained(base)
    assert find_tokenizer(base, adapter).chat_template is None
    tokenizer.chat_template = "a template"
    tokenizer.save_pretrained(adapter)
    assert find_tokenizer(base, adapter).chat_template == "a template"
    byte_level().save_pretrained(adapter)
    with pytest.raises(ModelLoadError, match="token 0 of the tokenizer beside it is "):
        find_tokenizer(base, adapter)


def settings(**changes: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(adapter: Path) -> None:
        found = load_file(adapter / "adapter_model.safetensors")
        change(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, adapter / "adapter_model.safetensors")

    return changed


def pickled(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({}, adapter / "adapter_model.bin")


def cut(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no settings": (lambda adapter: (adapter / "adapter_config.json").unlink(), r"no folder with adapter_config\.json"),
    "damaged settings": (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "it is not JSON"),
    "another kind": (settings(peft_type="IA3"), "it is a IA3 adapter, and only LORA"),
    "another task": (settings(task_type="SEQ_CLS"), "task SEQ_CLS"),
    "biases": (settings(bias="all"), "replaces biases"),
    "whole modules": (settings(modules_to_save=["lm_head"]), "has modules_to_save, which is not merged"),
    "token rows": (settings(trainable_token_indices=[1]), "has trainable_token_indices"),
    "unknown setting": (settings(no_such_thing=True), "has no_such_thing"),
    "changed base": (settings(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "code to import": (settings(megatron_config={"a": 1}, megatron_core="os"), "has megatron_config"),
    "rank of no number": (settings(r="many"), "r is 'many'"),
    "absurd rank": (settings(r=10**12), "a whole number in 1"),
    "other rank": (settings(r=8), "size mismatch"),
    "hard expression": (settings(alpha_pattern={"(a+)+$": 1}), "by names of modules"),
    "lost targets": (settings(target_modules=["q_proj", "up_proj"]), "names 'up_proj', for which"),
    "pickled": (pickled, r"only pickled weights \(adapter_model\.bin\)"),
    "no weights": (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), r"has no adapter_model\.saf"),
    "cut weights": (cut, "the weights are damaged"),
    "no tensors": (tensors(lambda found: found.clear()), "holds no LoRA matrices"),
    "integers": (tensors(lambda found: found.update({A: torch.ones(4, 64).int()})), "stored as torch.int32"),
    "half a pair": (tensors(lambda found: found.pop(B)), r"q_proj has no lora_B\.weight"),
    "whole weight": (
        tensors(lambda found: found.update({"base_model.model.lm_head.weight": torch.zeros(99, 64)})),
        "whole weight of lm_head, and .* has another one",
    ),
    "trained weight": (
        tensors(lambda found: found.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(VOCAB, 64)})),
        "whole weight of lm_head, and .* has another one",
    ),
    "other tensor": (
        tensors(lambda found: found.update({"base_model.model.lm_head.bias": torch.zeros(VOCAB)})),
        "lm_head.bias is no part of a LoRA matrix",
    ),
    "no such module": (
        tensors(lambda found: found.update({key.replace(".0.", ".7."): found[key].clone() for key in (A, B)})),
        r"a module model\.layers\.7\.self_attn\.q_proj, which",
    ),
    "other width": (tensors(lambda found: found.update({A: torch.ones(4, 32)})), r"\[4, 32\] and \[64, 4\]"),
    "not finite": (tensors(lambda found: found[A].fill_(torch.nan)), "NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(llama: Path, adapter: Path, case: str) -> None:
    change, reason = REFUSED[case]
    change(adapter)
    with pytest.raises(ModelLoadError, match=reason) as error:
        load_model(llama, "float32", adapter=adapter)
    assert str(adapter) in str(error.value)


def test_a_tied_weight_is_not_changed_twice(tmp_path: Path) -> None:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    make_adapter(tmp_path / "tied", tmp_path / "a", target_modules=["lm_head"])
    with pytest.raises(UnsupportedModelError, match=r"lm_head, whose weight .* shares with model\.embed_tokens"):
        load_model(tmp_path / "tied", adapter=tmp_path / "a")


def test_without_peft_it_says_how_to_install_it(
    llama: Path, saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[peft\]'"):
        load_model(llama, adapter=saved[0])


def test_a_loaded_model_gets_no_adapter(llama: Path, saved: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="the target is a loaded model"):
        LLM(load_model(llama), None, adapter=saved[0])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid look-ups, whatever base model the settings name."""
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
