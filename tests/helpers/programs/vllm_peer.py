"""vLLM's answers beside ours, in an environment of its own: FORERUN_VLLM_PYTHON names its Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from forerun import LLM
from forerun.models import Rows

PYTHON = os.environ.get("FORERUN_VLLM_PYTHON", "")
MISSING = "vLLM is not given: `make scale` makes an environment with it; or FORERUN_VLLM_PYTHON=ENV/bin/python"
SRC = Path(__file__).parents[3] / "src"
NEAR_TIE = 1e-3
"""Logits whose order the order of additions may change, in float32."""
SECONDS = 1500


def theirs(model: Path, prompts: list[list[int]], speculative: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """What vllm_greedy.py says. more: of what it is asked, such as `additional`."""
    library = next(iter(Path(PYTHON).absolute().parents[1].glob("lib/libiomp5.so")), None)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "LD_PRELOAD": str(library or ""),
        "PYTHONPATH": os.pathsep.join([str(SRC), *os.environ.get("FORERUN_VLLM_MORE", "").split(os.pathsep)]),
    }
    asked = {"model": str(model), "speculative": speculative, "prompts": prompts, **more}
    done = subprocess.run(
        [PYTHON, str(Path(__file__).parents[2] / "vllm_greedy.py")],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]  # its exit status tells nothing: it may kill itself when it shuts down
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def assert_same_up_to_a_near_tie(llm: LLM, prompt: list[int], ours: list[int], other: list[int]) -> None:
    differing = [index for index, (a, b) in enumerate(zip(ours, other, strict=True)) if a != b]
    if differing:
        index = differing[0]
        rows = Rows(llm.target.new_cache(), prompt + ours[:index], num_logits=1)
        logits = llm.target.forward([rows]).logits[0]
        gap = float(logits[ours[index]] - logits[other[index]])
        assert abs(gap) < NEAR_TIE, f"token {index}: {ours[index]} and {other[index]}, {gap} apart"
