"""The bundled pair as GGUF files in llama.cpp: its draft's acceptance there beside ours. Run by hand:

    FORERUN_LLAMA_CPP=llama.cpp/build/bin make test-all ARGS='-s tests/integration/test_llama_cpp_bridge.py'

docs/scaling.md has what it gave.
"""

from __future__ import annotations

import os
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.export.gguf import export_llama_cpp
from forerun.lab.bench.peers.llama_worker import LlamaServer
from forerun.utils.workloads import load_workload

PROGRAMS = os.environ.get("FORERUN_LLAMA_CPP", "")
K, NUM_PROMPTS, MAX_TOKENS = 4, 8, 96
SECONDS = 600
TYPES = ("F32", "F16", "Q8_0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PROGRAMS,
        reason="llama.cpp is not given: `make scale` compiles it; or FORERUN_LLAMA_CPP=FOLDER of llama-server",
    ),
]


def served(command: str, prompts: list[list[int]], folder: Path, name: str) -> tuple[list[list[int]], dict[str, Any]]:
    """llama.cpp's tokens, and its own timings summed over the prompts."""
    program, *arguments = shlex.split(command)
    more = ["--threads", "1", "--threads-batch", "1", "--parallel", "1", "--no-cache-prompt", "--offline", "-c", "1024"]
    tokens, sums = [], dict.fromkeys(("predicted_n", "predicted_ms", "draft_n", "draft_n_accepted"), 0.0)
    with closing(LlamaServer([str(Path(PROGRAMS) / program), *arguments, *more], folder, name)) as server:
        sums["build"] = server.get("/props").get("build_info", "unknown")
        for prompt in prompts:
            reply = server.post(
                "/completion",
                {
                    "prompt": prompt,
                    "n_predict": MAX_TOKENS,
                    "temperature": 0,
                    "samplers": ["top_k"],
                    "top_k": 1,
                    "ignore_eos": True,
                    "cache_prompt": False,
                    "return_tokens": True,
                },
            )
            tokens.append(reply["tokens"])
            for key in sums.keys() - {"build"}:
                sums[key] += reply["timings"].get(key, 0)
    return tokens, sums


@pytest.mark.parametrize("type_name", TYPES)
def test_the_bundled_pair_in_llama_cpp(type_name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    plain = export_llama_cpp("bundled", target, type_name=type_name, pre="gpt-2").command
    drafted = export_llama_cpp("bundled-draft", draft, target, type_name=type_name, num_draft_tokens=K).command
    llm = LLM("bundled", drafter="bundled-draft", num_draft_tokens=K, dtype="float32")
    prompts = [llm.encode(case.prompt)[:200] for case in load_workload("code", NUM_PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = [llm.generate(each, params).choices[0] for each in prompts]
    ours = sum(each.stats.num_accepted_tokens for each in answers) / sum(
        each.stats.num_draft_tokens for each in answers
    )
    alone, without = served(plain, prompts, tmp_path, "plain")
    tokens, found = served(drafted, prompts, tmp_path, "draft")
    accepted = found["draft_n_accepted"] / found["draft_n"]
    rates = [each["predicted_n"] / each["predicted_ms"] * 1000 for each in (without, found)]
    same = sum(a == b for a, b in zip(alone, tokens, strict=True))
    as_ours = sum(list(a.token_ids) == b for a, b in zip(answers, alone, strict=True))
    print(
        f"\n| {type_name} | {without['build']} | {ours:.3f} | {accepted:.3f} | {rates[0]:.0f} | {rates[1]:.0f} "
        f"| {same} of {NUM_PROMPTS} | {as_ours} of {NUM_PROMPTS} |"
    )
    assert found["draft_n"] > 0
    if type_name == "F32":
        assert accepted >= 0.9 * ours > 0
