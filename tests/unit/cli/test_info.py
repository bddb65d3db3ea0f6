"""`forerun info` says what runs, and why."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from forerun.cli import info
from forerun.drafters.models.head_files.folder import save_head
from forerun.errors import NativeUnavailableError
from forerun.kernels import cpu as module
from forerun.kernels.cpu import prefetching
from forerun.kernels.cpu.compiler import PREBUILT
from head_cases import EXTENDED, random_d2t, random_tensors

from .conftest import Invoke


def facts(invoke: Invoke) -> dict[str, object]:
    result = invoke("info", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["torch"] and told["cpu"] and told["threads"] >= 1 and isinstance(told["processor_features"], list)
    kernels: dict[str, object] = told["kernels"]
    return kernels


def test_which_kernels_run(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORERUN_KERNELS", "FORERUN_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)
    library = SimpleNamespace(path=Path("/some/library.so"), supported=["avx512", "avx2"], instructions="avx512")
    monkeypatch.setattr(module, "_loaded", library)
    reason = "avx512 is the best instruction set that the library and this processor have."
    expected = {"run": "native", "instructions": "avx512", "library": "/some/library.so", "reason": reason}
    monkeypatch.setattr(prefetching, "_known", {})
    assert facts(invoke) == expected | {"prebuilt": False, "prefetch_distances": {}}
    assert re.search(r"^prefetching: +nothing tried with these threads$", invoke("info").stdout, re.MULTILINE)
    for known in prefetching._known.values():
        known["Q4_K"] = [0, 2048, 8192]
    assert re.search(r"^prefetching: +Q4_K 0/2048/8192 bytes ahead", invoke("info").stdout, re.MULTILINE)
    library.instructions = "avx2"
    assert facts(invoke)["reason"] == reason.replace("avx512", "avx2")
    monkeypatch.setenv("FORERUN_INSTRUCTIONS", "avx2")
    told = facts(invoke)
    assert told["reason"] == "FORERUN_INSTRUCTIONS says avx2; this processor has avx512." and told["run"] == "native"
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    assert facts(invoke) == expected | {
        "run": "reference",
        "instructions": None,
        "library": None,
        "reason": "FORERUN_KERNELS says so.",
    }


@pytest.mark.parametrize(
    ("system", "name", "processor", "where"),
    [
        ("linux", "Linux", "x86_64", None),
        ("linux", "Linux", "aarch64", "Linux with a processor of aarch64"),
        ("darwin", "Darwin", "arm64", "macOS with a processor of arm64"),
        ("win32", "Windows", "AMD64", "Windows with a processor of AMD64"),
    ],
)
def test_machines_that_the_kernels_never_ran_on(
    monkeypatch: pytest.MonkeyPatch, system: str, name: str, processor: str, where: str | None
) -> None:
    monkeypatch.delenv("FORERUN_KERNELS", raising=False)
    library = SimpleNamespace(path=Path("/some/library.so"), supported=["best"], instructions="best")
    monkeypatch.setattr(module, "_loaded", library)
    monkeypatch.setattr(prefetching, "_known", {})
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "system", lambda: name)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    reason = info._kernels()["reason"]
    assert (f"never run on {where} before" in reason) if where else ("never" not in reason)


def test_performance_cores_are_told_where_there_are_others(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.utils.machine.cores", lambda: 12)
    monkeypatch.setattr(info, "performance_cores", lambda: 4)
    assert re.search(r"^cores: +12, of which 4 performance cores, \d+ threads", invoke("info").stdout, re.MULTILINE)
    assert json.loads(invoke("info", "--json").stdout)["performance_cores"] == 4
    monkeypatch.setattr(info, "performance_cores", lambda: 12)
    assert re.search(r"^cores: +12, \d+ threads", invoke("info").stdout, re.MULTILINE)


def test_kernels_of_a_wheel(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORERUN_KERNELS", "FORERUN_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)
    library = SimpleNamespace(path=PREBUILT / "libforerun.dylib", supported=["neon"], instructions="neon")
    monkeypatch.setattr(module, "_loaded", library)
    monkeypatch.setattr(prefetching, "_known", {})
    assert facts(invoke)["prebuilt"] is True
    assert re.search(r"^library: .*libforerun\.dylib, prebuilt$", invoke("info").stdout, re.MULTILINE)


def test_a_better_instruction_set_that_could_not_be_compiled(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("FORERUN_KERNELS", "FORERUN_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)
    note = {"reason": "Why.", "remedy": "What to do.", "timeouts": 0}
    (tmp_path / "key.avx512.failed.json").write_text(json.dumps(note))
    library = SimpleNamespace(path=tmp_path / "key" / "library.so", supported=["avx512", "avx2"], instructions="avx2")
    monkeypatch.setattr(module, "_loaded", library)
    told = facts(invoke)["reason"]
    assert told == (
        "avx2 is the best instruction set that the library and this processor have. This processor has avx512. Why. "
        "What to do."
    )


def test_without_native_kernels(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_KERNELS", raising=False)
    monkeypatch.setattr(module, "_loaded", NativeUnavailableError("Why.", "What to do."))
    result = invoke("info")
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert lines["kernels"].strip() == "reference" and lines["library"].strip() == "none"
    assert lines["reason"].strip().startswith("Why. ") and lines["reason"].endswith(" What to do.")
    assert lines["FORERUN_HOME"].strip() and lines["processor"].strip()
    monkeypatch.setenv("FORERUN_KERNELS", "native")
    refused = invoke("info")
    assert (
        refused.exit_code == 2 and "FORERUN_KERNELS is native, but there are no native kernels. Why." in refused.stderr
    )


def test_the_memory_of_a_model(invoke: Invoke) -> None:
    result = invoke("info", "--model", "bundled", "--quantize", "int8", "--drafter", "draft-model", "--json")
    told = json.loads(result.stdout)["memory"]
    target, draft = told["models"]
    assert (target["name"], target["number_format"], draft["name"]) == ("bundled", "int8", "bundled-draft")
    assert target["weight_bytes"] < target["loading_bytes"] and draft["pages"] > target["pages"] > 1
    text = invoke("info", "--model", "bundled").stdout
    for line in (r"weights: +26 MB, at most", r"pages: +up to [\d,]+ of", r"scratch: +\d", r"memory: +.* available"):
        assert re.search(line, text), text
    assert re.search(r"context: +up to 2,048 tokens$", text, re.MULTILINE), text


def test_the_context_that_memory_holds(invoke: Invoke) -> None:
    arguments = ("info", "--model", "bundled", "--cache-memory", "0.01")
    told = json.loads(invoke(*arguments, "--json").stdout)["memory"]
    assert 64 <= told["context_length"] < told["full_context_length"] == 2048
    line = rf"context: +up to {told['context_length']:,} tokens: memory; the model's own 2,048$"
    assert re.search(line, invoke(*arguments).stdout, re.MULTILINE)
    assert "up to 100 tokens" in invoke(*arguments, "--max-model-len", "100").stdout
    assert "up to 64" not in invoke(*arguments, "--max-model-len", "auto").stdout
    refused = invoke(*arguments, "--max-model-len", "2000")
    assert refused.exit_code == 2 and "max_model_len is 2000, but keys and values of bundled" in refused.output


def test_a_model_that_does_not_fit(invoke: Invoke) -> None:
    result = invoke("info", "--model", "bundled", "--cache-memory", "1e9")
    assert result.exit_code == 2 and "cache_memory is 1e+09 GiB" in result.output


def test_what_a_head_is(invoke: Invoke, tmp_path: Path) -> None:
    save_head(tmp_path, EXTENDED, random_tensors(EXTENDED), random_d2t(EXTENDED), number_format="bfloat16")
    result = invoke("info", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = dict(re.split(r": +", line, maxsplit=1) for line in result.stdout.splitlines())
    assert lines["head"].startswith("EAGLE-3, form forerun, float32, ") and "window of 64" in lines["head"]
    assert (lines["reads"], lines["proposes"]) == ("states of layers 1, 6, 9, 32 wide", "40 of 96 tokens")
    assert (
        lines["target"] == "bfloat16"
        and lines.keys() == json.loads(invoke("info", str(tmp_path), "--json").stdout).keys()
    )
    assert invoke("info", str(tmp_path / "none")).exit_code == 2


def test_a_head_that_needs_its_target(invoke: Invoke, tmp_path: Path) -> None:
    """Check that a head which does not name its layers is shown with the target that --model names."""
    config = {
        "architectures": ["MedusaModel"],
        "hidden_size": 8,
        "vocab_size": 16,
        "num_heads": 1,
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {"blocks.0.layers.0.weight": torch.ones(8, 8)}
    save_file({**tensors, "lm_heads.0.weight": torch.ones(16, 8)}, tmp_path / "model.safetensors")
    assert "Give the target too (--model)." in invoke("info", str(tmp_path)).stderr
    result = invoke("info", str(tmp_path), "--model", "bundled")
    assert result.exit_code == 0 and "Medusa" in result.stdout, result.output


def test_a_model_is_told_from_a_head(invoke: Invoke, tmp_path: Path) -> None:
    text = invoke("info", "bundled", "--draft-model", "bundled-draft", "--quantize", "int8").stdout
    assert "model:        bundled, int8" in text and "model:        bundled-draft" in text
    twice = invoke("info", "bundled", "-m", "bundled")
    assert twice.exit_code == 2 and "The model is given twice" in twice.stderr
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "config.json" in invoke("info", str(tmp_path)).stderr
