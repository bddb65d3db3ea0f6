"""Run the kernels for ARM64 here, by an emulator, and compare their bits with those of AVX2: `make arm`.

Tests record calls of the native library (`recorder.py`); a program with the kernels of each ARM64 instruction set,
which ziglang compiles, repeats them under qemu-aarch64 (`replay.cpp`). All lies in build/arm; what has been compiled of
the same sources is used again. Returns 1 if any bit differs, 2 if a tool is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from arm.recorder import INSTRUCTIONS, VARIABLE
from forerun.config import ARM_INSTRUCTIONS, X86_INSTRUCTIONS
from forerun.kernels.cpu.compiler import FLAGS, SOURCES, Compiler
from forerun.utils.files import digest

HERE = Path(__file__).parent
BUILD = Path("build/arm")
TARGET = "aarch64-linux-musl"
"""Linked statically: the emulator needs no libraries of that processor."""
COMPILED = ("processor", "forerun", *ARM_INSTRUCTIONS)
COMPILING_SECONDS = 1800.0
QEMU = ("qemu-aarch64", "qemu-aarch64-static")
KERNELS = "tests/unit/kernels/"
MODELS = "tests/unit/models/"
RECORDED = (
    *(f"{KERNELS}test_{name}.py" for name in ("block_weight", "native_attention", "native_linear", "native_pick")),
    *(f"{MODELS}test_{name}.py" for name in ("native_draft_session", "native_models")),
    "tests/unit/drafters/test_native_block.py",
)
"""Tests whose calls are recorded, but for those of `_LEFT_OUT`."""
_OTHERS = [name for name in X86_INSTRUCTIONS if name != INSTRUCTIONS]
_LOGITS = "test_float32_logits_are_those_of_the_references_but_for_the_order_of_sums"
_LEFT_OUT = (
    *("portable", *_OTHERS, "many_parts", "any_number_of", "any_order", "memory", "thread", "gguf_package", _LOGITS),
)
_FAMILIES = (
    *("qwen3", "gemma2", "gptj", "nemotron", "apertus", "cohere2", "gpt_oss", "qwen3_moe", "deepseek_v3", "mamba2"),
    *("falcon_h1", "lfm2", "qwen3_next", "olmo_hybrid"),
)
"""Families of `_LOGITS` whose norms, activations, windows, experts, latents and states differ."""
_ALL_OF = (
    (*RECORDED, "-k", " and ".join(f"not {name}" for name in _LEFT_OUT)),
    ("-m", "not gpu", *(f"{MODELS}test_native_models.py::{_LOGITS}[{family}]" for family in _FAMILIES)),
)
"""What pytest is told, each time that it runs."""


def main() -> int:
    qemu = next(filter(None, map(shutil.which, QEMU)), None)
    if qemu is None:
        return _lacking("qemu-aarch64", "apt-get install qemu-user-static")
    if find_spec("ziglang") is None:
        return _lacking("ziglang", f"{sys.executable} -m pip install ziglang")
    program, calls = _program(), BUILD / "calls.bin"
    recorded = {VARIABLE: str(calls), "LD_PRELOAD": str(_rounded_here().absolute())}
    calls.write_bytes(b"")
    print("recording calls ...", flush=True)
    for arguments in _ALL_OF:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "arm.recorder", *arguments]
        if subprocess.run(command, env=os.environ | recorded, check=False).returncode:
            return 1
    print(f"{calls.stat().st_size / 1e6:.0f} MB of calls; repeating them ...", flush=True)
    return subprocess.run([qemu, "-cpu", "max", program, calls], check=False).returncode


def _lacking(name: str, remedy: str) -> int:
    print(f"make arm: there is no {name}; {remedy}", file=sys.stderr)
    return 2


def _rounded_here() -> Path:
    """Compile rounded.cpp for this machine, and return the library."""
    library = BUILD / "rounded.so"
    command = (sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", "-o")
    subprocess.run([*command, library, HERE / "rounded.cpp", "-lm"], check=True)
    return library


def _program() -> Path:
    """Compile replay.cpp, and the kernels that have changed, one file on each core, and return the program."""
    command = (sys.executable, "-m", "ziglang", "c++", "-target", TARGET, "-g0")
    version = subprocess.run([*command[:3], "version"], capture_output=True, text=True, check=True).stdout
    flags = [flag for flag in FLAGS if flag != "-shared"]
    sources = sorted((*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")))
    key = digest("\n".join((version, *command, *flags)).encode(), *(path.read_bytes() for path in sources))[:16]
    folder = BUILD / key
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "replay"
    own = {"replay": HERE / "replay.cpp", "rounded": HERE / "rounded.cpp"}
    files = {**{name: SOURCES / f"{name}.cpp" for name in COMPILED}, **own}
    lacking = {name: path for name, path in files.items() if name in own or not (folder / f"{name}.o").exists()}
    compiler = Compiler(command, version)
    print(f"compiling {', '.join(lacking)} ...", flush=True)
    compiling = {
        name: [*flags, f"-I{SOURCES}", "-c", str(path), "-o", str(folder / f"{name}.o")]
        for name, path in lacking.items()
    }
    objects = [str(folder / f"{name}.o") for name in files]
    linking = {"replay": ["-static", "-o", str(program), *objects]}
    for arguments in (compiling, linking):
        for failure in compiler.outcomes(arguments, COMPILING_SECONDS).values():
            raise failure
    return program


if __name__ == "__main__":
    sys.exit(main())
