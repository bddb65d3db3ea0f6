"""Damaged or contradictory folders raise an error of forerun that names the file and the fault."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import FAMILIES, VOCAB, make_family
from forerun import LLM, SamplingParams
from forerun.errors import ModelLoadError, NotEnoughMemoryError, PromptError
from forerun.models import Rows, find_tokenizer, load_draft_model, load_model, load_tokenizer
from forerun.utils import json_file
from fuzzing import examples, fails

WEIGHTS = "model.safetensors"
NESTED = "[" * 10_000 + "]" * 10_000


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_family("llama", tmp_path_factory.mktemp("healthy"))
    load_tokenizer("bundled").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    return shutil.copytree(healthy, tmp_path / "model")


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but must be a whole number of 1 or more"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"dtype": "float99"}, "dtype is 'float99', but must be a number format of torch"),
        ({"dtype": 3}, "dtype is 3"),
        ({"model_type": 5}, "model_type is 5"),
        ({"model_type": None}, "model_type"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
        ({"eos_token_id": 1.5}, "eos_token_id is 1.5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, but must be a number in 0..1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, but must be a number"),
        ({"rope_theta": 0}, "rope_theta is 0, but must be a number of 1 or more"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_parameters: rope_theta is -1"),
        (
            {"rope_parameters": {"rope_type": "../../x", "rope_theta": 1e4}},
            "rope_type is '../../x', but must be default",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ({"sliding_window": 0}, "sliding_window is 0, but must be a whole number"),
        ({"hidden_act": "eval"}, "hidden_act is 'eval', but must be an activation that Transformers has"),
        ({"initializer_range": 1e300}, r"initializer_range is 1e\+300"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers is 'x'"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"layer_types": ["no_such_attention"] * 2}, "layer_types"),
        ({"hidden_act": "no_such_act"}, "no_such_act"),
        ({"num_attention_heads": 5}, "heads|shape|hidden"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights are quantized by gptq, and none is"),
        ({"quantization_config": 3}, "quantization_config is 3"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, but must be a whole number in 1"),
        ({"num_hidden_layers": 4_096}, "speaks of 4096 layers, and the weights have 2"),
        ({"num_hidden_layers": 1}, r"the weights have model\.layers\.1, but config\.json speaks of 1 layers only"),
        ({"vocab_size": 10**12}, r"has shape \[96, 64\] .*1000000000000, 64\] by config"),
        ({"intermediate_size": 10**14}, r"has shape .* by config\.json. Give the config\.json that"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_value_of_config_json_that_cannot_be(values: dict[str, Any], said: str, folder: Path) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_model(folder, "float32")
    assert "config.json" in str(caught.value) and "ignore_mismatched" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "key", "value", "said"),
    [
        ("gptj", "rotary_dim", 0, "rotary_dim is 0"),
        ("phimoe", "router_jitter_noise", -1, "router_jitter_noise is -1"),
        ("deepseek_v2", "topk_method", None, "no decoder computes topk_method=None"),
    ],
)
def test_a_value_that_one_family_cannot_have(family: str, key: str, value: Any, said: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path)
    change(path / "config.json", **{key: value})
    with pytest.raises(ModelLoadError, match=said):
        load_model(path, "float32")


def test_whole_numbers_are_taken_for_numbers_and_the_other_way_round(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=1, hidden_size=64.0, num_hidden_layers=2.0, eos_token_id=3.0)
    model = load_model(folder, "float32")
    assert model.eos_token_ids == {0, 3}  # 0 is the tokenizer's


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", r"generation_config\.json: it holds a list, but must hold an object"),
        (NESTED, r"generation_config\.json: it is nested too deeply"),
        ('{"eos_token_id": "x"}', r"generation_config\.json: eos_token_id is 'x'"),
        ('{"eos_token_id": [1, "x"]}', r"generation_config\.json: eos_token_id is \[1, 'x'\]"),
        ('{"do_sample": true, "temperature": "hot"}', r"generation_config\.json: temperature is 'hot'"),
    ],
)
def test_generation_config(content: str, said: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=said):
        load_model(folder, "float32")


def test_what_generation_config_recommends_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 1.0,
        "repetition_penalty": 1.1,
        "eos_token_id": [5, VOCAB],
    }
    (folder / "generation_config.json").write_text(json.dumps(options))
    with caplog.at_level(logging.INFO, "forerun.models.loading"):
        model = load_model(folder, "float32")
    assert model.eos_token_ids == {0, 5}  # 0 is the tokenizer's
    (line,) = [record.getMessage() for record in caplog.records]
    assert "recommends repetition_penalty 1.1, temperature 0.6;" in line
    caplog.clear()
    load_draft_model(folder, "float32")
    assert not caplog.records


def test_weights_are_not_rounded_in_silence(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_weights(folder, lambda tensors: tensors.update({k: t.half() for k, t in tensors.items()}))
    with caplog.at_level(logging.WARNING):
        assert load_model(folder).dtype == torch.bfloat16
        (line,) = [record.getMessage() for record in caplog.records]
        assert "are float16 and are rounded to bfloat16" in line
        caplog.clear()
        assert load_model(folder, "auto").dtype == torch.float32
        assert not caplog.records


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", NESTED, "nested too deeply"),
        ("config.json", "[1]", "must hold an object"),
        ("config.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", NESTED, "nested too deeply"),
        ("tokenizer_config.json", "3", "must hold an object"),
        ("added_tokens.json", "{", "not JSON"),
        ("tokenizer.json", "{", "it is not JSON"),
        ("tokenizer.json", NESTED, "it is nested too deeply"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}}', "no tokenizer can be made of it"),
    ],
)
def test_damaged_json(file: str, content: str | bytes, said: str, folder: Path) -> None:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelLoadError, match=said):
        LLM(folder, None, dtype="float32")


def test_a_folder_without_a_tokenizer_is_served_by_ids(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()
    assert find_tokenizer(folder) is None


def _shard(folder: Path, index: str) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"a"', "index.json: it is not JSON"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {}}', "weight_map is empty"),
        ('{"weight_map": {"a": 3}}', "a is 3, but must be a string"),
        ('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}', "it names model-00002-of-00002"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "may name .* beside it only"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "may name .* beside it only"),
    ],
)
def test_damaged_shard_index(index: str, said: str, folder: Path) -> None:
    _shard(folder, index)
    with pytest.raises(ModelLoadError, match=said):
        load_model(folder, "float32")


def test_shards_are_read(folder: Path) -> None:
    _shard(folder, json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}))
    assert load_model(folder, "float32").num_layers == 2


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", WEIGHTS])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_place_of_a_file(name: str, make: Callable[[Path], None], folder: Path) -> None:
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        LLM(folder, None, dtype="float32")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.0.mlp.up_proj.bias", torch.ones(128), r"hold model\.layers\.0\.mlp\.up_proj\.bias"),
        ("model.layers.1.self_attn.q_norm.weight", torch.ones(16), r"hold model\.layers\.1\.self_attn\.q_norm"),
        ("model.layers.1.mlp.up_proj.weight_scale", torch.ones(1), "weight_scale"),
        ("model.layers.1.mlp.up_proj.weight", torch.ones(128, 64, dtype=torch.int8), "is stored as I8"),
        ("model.layers.1.mlp.up_proj.weight", torch.ones(128, 64).to(torch.float8_e4m3fn), "is stored as F8_E4M3"),
        ("model.layers.1.mlp.up_proj.weight", torch.ones(128, 63), r"up_proj\.weight has shape \[128, 63\]"),
        ("model.layers.7.mlp.up_proj.weight", torch.ones(128, 64), r"have model\.layers\.7"),
    ],
)
def test_weights_that_would_change_the_model_are_an_error(name: str, tensor: Tensor, said: str, folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(ModelLoadError, match=said):
        load_model(folder, "float32")


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("lfm2", "conv.conv.weight"),
        ("olmo_hybrid", "linear_attn.dt_bias"),
        ("qwen3_5_text", "linear_attn.conv1d.weight"),
        ("qwen3_next", "linear_attn.A_log"),
    ],
)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_recurrent_layer_lacks_a_weight(family: str, tensor: str, quantize: str | None, tmp_path: Path) -> None:
    folder, name = make_family(family, tmp_path), f"model.layers.0.{tensor}"
    change_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=rf"lacks 1 weights, among them {re.escape(name)}"):
        load_model(folder, quantize=quantize)


def test_weights_for_other_tasks_are_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["mtp.0.weight", "vision_tower.layers.9.weight", "vision_tower.layers.9.bias", "v_head.summary.weight"]
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))
    with caplog.at_level(logging.WARNING):
        load_model(folder, "float32")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("mtp.* (1), v_head.* (1), vision_tower.* (2).")


def test_layers_that_predict_further_tokens_are_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(folder / "config.json", num_nextn_predict_layers=1)
    names = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"]
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))
    with caplog.at_level(logging.WARNING):
        load_model(folder, "float32")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("model.layers.2.* (2).")
    change(folder / "config.json", num_nextn_predict_layers=None)
    with pytest.raises(ModelLoadError, match=r"the weights have model\.layers\.2"):
        load_model(folder, "float32")


def test_an_output_layer_that_a_tied_configuration_would_leave_out(folder: Path) -> None:
    """Check that Transformers uses the output layer of the weights if it differs from the embedding."""
    untied = load_model(folder, "float32")
    change(folder / "config.json", tie_word_embeddings=True)
    rows = [Rows(untied.new_cache(), [1, 2, 3])]
    tied = load_model(folder, "float32")
    assert tied.forward([Rows(tied.new_cache(), [1, 2, 3])]).logits.equal(untied.forward(rows).logits)


def test_what_a_model_computes_itself_is_left_out_in_silence(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.0.self_attn.masked_bias"] = torch.ones(1)
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change(folder / "config.json", tie_word_embeddings=True)
    change_weights(folder, add)
    with caplog.at_level(logging.WARNING):
        load_model(folder, "float32")
    assert not caplog.records


def test_a_draft_model_with_nan_is_refused(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(ModelLoadError, match=r"draft model .* model\.norm\.weight holds NaN or infinity"):
        load_draft_model(folder, "float32")
    assert "model.norm.weight" in str(load_model(folder, "float32").exactness.reason)


class TestFuzz:
    """Any change of any file: a model, or our own error."""

    FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", WEIGHTS)

    @examples(30)
    @given(data=st.data())
    def test_bytes(self, healthy: Path, tmp_path: Path, data: st.DataObject) -> None:
        folder = shutil.copytree(healthy, tmp_path / "model", dirs_exist_ok=True)
        path = folder / data.draw(st.sampled_from(self.FILES))
        content = bytearray(path.read_bytes())
        limit = min(len(content), 4096) - 1  # the header of the weights; their numbers may be any
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, limit)) :]
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, limit))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        attempt(folder)

    VALUES = st.sampled_from([None, True, -1, 0, 1, 0.5, 1e308, 10**30, "", "x", [], [1], [[]], {}, {"a": {}}])

    @examples(30)
    @given(data=st.data())
    def test_types(self, healthy: Path, tmp_path: Path, data: st.DataObject) -> None:
        folder = shutil.copytree(healthy, tmp_path / "model", dirs_exist_ok=True)
        path = folder / data.draw(st.sampled_from(self.FILES[:4]))
        key = data.draw(st.sampled_from(sorted(json.loads(path.read_text(encoding="utf-8")))))
        change(path, **{key: data.draw(self.VALUES)})
        attempt(folder)

    ODD = (None, 0, -1, 0.5, math.nan, math.inf, 1e-320, 1e300, 2**62, True, "x", "../../x", [], {})

    @pytest.mark.slow
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_value_of_a_configuration(self, family: str, tmp_path: Path) -> None:
        """Check that a model either computes, or is refused when it is loaded."""
        path = make_family(family, tmp_path) / "config.json"
        whole = json.loads(path.read_text(encoding="utf-8"))
        for key in whole.keys() - {"model_type"}:
            inner = whole[key] if isinstance(whole[key], dict) else {}
            for value in (*self.ODD, *({**inner, name: odd} for name in inner for odd in self.ODD)):
                path.write_text(json.dumps({**whole, key: value}), encoding="utf-8")
                try:
                    llm = LLM(path.parent, None, dtype="float32")
                except (ModelLoadError, NotEnoughMemoryError):
                    continue
                with contextlib.suppress(PromptError):  # a context of one token
                    llm.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0))

    def test_json_that_nobody_checks_is_found(
        self, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(json_file, "parse_json", lambda content, *_, **__: json.loads(content))
        assert fails(self.test_bytes, 30, {"data": st.data()}, self=self, healthy=healthy, tmp_path=tmp_path)


def attempt(folder: Path) -> None:
    for load in (lambda: load_model(folder, "float32"), lambda: find_tokenizer(folder)):
        with contextlib.suppress(ModelLoadError):
            load()
