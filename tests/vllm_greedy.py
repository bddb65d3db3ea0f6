"""Greedy answers of vLLM, plain or with speculation, as JSON. Run by the Python of vLLM's environment.

Standard input: {"model", "speculative" (or null), "prompts" (lists of token ids), "max_tokens"}, and if wanted
"additional" (vLLM's additional configuration), "max_num_seqs" (1), "max_model_len" (1024) and "tensor_parallel_size"
(1). The last line of standard output that begins with "{" is {"token_ids", "counters" (of vLLM's speculative decoding),
"forwards" (of the target, prompts included; 0 of several ranks, which compute in processes of their own), "seconds" (of
all answers), "propose" (seconds of each call of a custom class), and "propose_cpu" (the same of the processor)}.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter, thread_time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that what is counted here is what computes


def counted(forwards: list[int]) -> None:
    """Append the number of rows' tokens of each of the target's forwards."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute = GPUModelRunner.execute_model

    def wrapped(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            forwards.append(scheduler_output.total_num_scheduled_tokens)
        return execute(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = wrapped


def timed(seconds: list[float], of_processor: list[float]) -> None:
    """Append the seconds of each call of forerun's `propose`, by the clock and of the processor."""
    from forerun.integrations.vllm import Proposer

    propose = Proposer.propose

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        start, worked = perf_counter(), thread_time()
        proposed = propose(self, *args, **kwargs)
        of_processor.append(thread_time() - worked)
        seconds.append(perf_counter() - start)
        return proposed

    Proposer.propose = wrapped  # type: ignore[method-assign]


def main() -> None:
    """Answer all prompts, one after another, or together where max_num_seqs says so."""
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.load(sys.stdin)
    forwards, proposed, worked = list[int](), list[float](), list[float]()
    counted(forwards)
    if (asked["speculative"] or {}).get("method") == "custom_class":
        timed(proposed, worked)
    max_num_seqs = asked.get("max_num_seqs", 1)
    llm = LLM(
        model=asked["model"],
        dtype="float32",
        max_model_len=asked.get("max_model_len", 1024),
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=asked.get("tensor_parallel_size", 1),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=asked["speculative"],
        additional_config=asked.get("additional") or {},
    )
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)  # warm
    forwards.clear()
    proposed.clear()
    worked.clear()
    start, answers = perf_counter(), []
    for first in range(0, len(prompts), max_num_seqs):
        outputs = llm.generate(prompts[first : first + max_num_seqs], params, use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
    seconds = perf_counter() - start
    counters = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            counters[metric.name] = getattr(metric, "value", None) or getattr(metric, "values", None) or 0
    said = {
        "token_ids": answers,
        "counters": counters,
        "forwards": len(forwards),
        "seconds": seconds,
        "propose": proposed,
        "propose_cpu": worked,
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
