"""Greedy answers of vLLM with and without a draft head, as JSON. Run by the Python of vLLM's environment.

Standard input: {"model", "speculative" (or null), "prompts" (lists of token ids), "max_tokens"}. The last line of
standard output that begins with "{" is {"token_ids", "counters" (of vLLM's speculative decoding)}.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Answer all prompts, one after another."""
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.load(sys.stdin)
    llm = LLM(
        model=asked["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=asked["speculative"],
    )
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
    answers = []
    for ids in asked["prompts"]:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    counters = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            counters[metric.name] = getattr(metric, "value", None) or getattr(metric, "values", None) or 0
    print(json.dumps({"token_ids": answers, "counters": counters}), flush=True)


if __name__ == "__main__":
    main()
