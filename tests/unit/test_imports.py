"""Importing forerun does not import what only loading a model needs."""

import subprocess
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from gguf_files import TINY, write_gguf
from gguf_metadata import sentencepiece


def test_transformers_comes_with_the_first_model() -> None:
    code = "import sys; from forerun import LLM; from forerun.models import load_model; "
    code += "print([name for name in sys.modules if name.startswith('transformers')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_gguf_files_and_the_bundled_model_need_no_transformers(tmp_path: Path) -> None:
    size = len(sentencepiece()["tokenizer.ggml.tokens"])
    config = LlamaConfig(**TINY, vocab_size=size, hidden_size=64, intermediate_size=64)
    write_gguf(tmp_path / "it.gguf", LlamaForCausalLM(config), keys=sentencepiece())
    code = "import sys; from forerun import LLM, SamplingParams\nfor name in sys.argv[1:]: "
    code += "LLM(name).generate('hello', SamplingParams(max_tokens=1)); print('transformers' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "it.gguf"), "bundled"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_wheel_is_compiled_where_torch_is_not() -> None:
    """The hook of `make wheel` runs in an environment that has the build's own needs alone."""
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import forerun.kernels.cpu.compiler; "
    code += "import forerun.kernels.cpu.compiler, forerun.kernels.cpu.platform_tag"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
