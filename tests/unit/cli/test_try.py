"""`forerun try`: a model beside what belongs to it, in little time."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.cli import try_ as command
from gguf_files import write_gguf

from .conftest import Invoke


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_TOKENS", 8)  # four prompts and so few tokens end long before the time


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts that are texts, and token ids for models without a tokenizer."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "5 3 8 5 3 8"}\n' * 4)
    return tmp_path / "prompts.jsonl"


def tiny(width: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, eos_token_id=None, **sizes)
    )


def test_the_time_grows_with_the_model() -> None:
    seconds = [command.time_for(answer) for answer in (0.2, 4.0, 12.0, 120.0)]
    assert seconds == [56.0, 160.0, 480.0, 20 * 120.0]


@pytest.mark.slow
def test_the_bundled_model_beside_its_draft_model(invoke: Invoke, prompts: Path) -> None:
    result = invoke("try", "bundled", "--prompts", str(prompts))
    assert result.exit_code == 0, result.output
    assert "hybrid:sources=suffix+draft-model" in result.stdout and "draft-model:" not in result.stdout
    assert "plain" in result.stdout and "suffix" in result.stdout and "over plain" in result.stdout
    assert "Memory: weights" in result.stdout
    assert "forerun generate 'def fibonacci(n):' --model bundled --drafter " in result.stdout
    for label in ("Start it: ", "As a server: "):  # what is to be typed can be
        line = next(each for each in result.stdout.splitlines() if each.startswith(label))
        words = shlex.split(line.removeprefix(label))[1:]
        assert invoke(*words, "--nonsense").output.count("No such option: --nonsense") == 1


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_folder_and_a_file_with_a_smaller_model_beside(
    invoke: Invoke, prompts: Path, tmp_path: Path, kind: str
) -> None:
    names = {"folder": ("target", "draft"), "file": ("target.gguf", "draft.gguf")}[kind]
    for name, width in zip(names, (64, 8 if kind == "folder" else 32), strict=True):
        if kind == "folder":
            tiny(width).save_pretrained(tmp_path / name)
        else:
            write_gguf(tmp_path / name, tiny(width))
    target = str(tmp_path / names[0])
    result = invoke("try", target, "--prompts", str(prompts), "--quantize", "none")
    assert result.exit_code == 0, result.output
    assert "about a minute at most: this model writes " in result.stderr and "first token, ms" in result.stdout
    assert f"forerun serve --model {target}" in result.stdout and "--quantize none" in result.stdout


@pytest.mark.parametrize(
    ("text", "model", "told"),
    [
        ("", "bundled", "holds no prompts"),
        ('{"prompt": "5 3"}\n' * 4, "./nowhere", "model folder ./nowhere does not exist"),
        ('{"prompt": "5 3"}\n' * 4, "encoder", "cannot be served: an encoder-decoder"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    invoke: Invoke, prompts: Path, tmp_path: Path, text: str, model: str, told: str
) -> None:
    prompts.write_text(text)
    if model == "encoder":
        model = str(tmp_path / model)
        Path(model).mkdir()
        (Path(model) / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    result = invoke("try", model, "--prompts", str(prompts))
    assert result.exit_code == 2 and told in result.stderr
