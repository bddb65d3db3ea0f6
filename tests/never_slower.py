"""Measure whether speculation is ever slower than plain decoding: every prompt by every drafter, in interleaved rounds.

Run it on a quiet machine, with fresh costs:

    FORERUN_COST_CACHE=0 OMP_NUM_THREADS=2 python tests/never_slower.py smollm2 int4 "suffix;eagle;recycling"
    ... "suffix;suffix@2;suffix@4" --crowd 16     # fixed K beside automatic; 16 requests at a time

It prints for each drafter the ratio of speeds to plain decoding: geometric mean, median, least, prompts below 0.98.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.cli.bench.shared import CompareOptions
from forerun.config import OFF
from forerun.lab.bench.methods import quieten
from forerun.lab.bench.prompts import prepare


def prompts_of(llm: LLM, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts; of a question on a long text, the text with a question behind it."""
    if args.copying:
        text = Path(args.copying).read_text()
        ids = llm.tokenizer.encode(text)[: args.copying_tokens]
        start = random.Random(0).randrange(len(ids) // 2)
        quoted = llm.tokenizer.decode(ids[start : start + 24])
        ask = f"Read this:\n\n{llm.tokenizer.decode(ids)}\n\nRepeat word for word what follows {quoted!r}."
        rendered: Any = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return [list(rendered)]
    cases = CompareOptions(prompts=args.prompts, num_prompts=args.num_prompts, max_tokens=args.max_tokens).cases()
    return [list(each.token_ids) for some in prepare(llm, cases, args.max_tokens).values() for each in some]


def timed(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], decoding: bool = False
) -> tuple[float, list[Any]]:
    """Return the seconds, of the decoding alone that of one request after its first token, and the results."""
    start = time.perf_counter()
    results: Any = llm.generate(prompts, params)
    return time.perf_counter() - start - decoding * results[0].stats.time_first_token, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("format", help="int4, int8, bfloat16, float32")
    parser.add_argument("drafters", help="with ; between them; @K fixes K")
    parser.add_argument("--prompts", default="questions")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--crowd", type=int, default=1, help="requests at a time")
    parser.add_argument(
        "--copying", help="a text file, of which a question asks for a part; the prompt's time is left out"
    )
    parser.add_argument("--copying-tokens", type=int, default=6000)
    args = parser.parse_args()
    quieten()
    is_float = not args.format.startswith("int")
    form = {"dtype": args.format, "quantize": "none"} if is_float else {"quantize": args.format}
    engine = {"prefix_reuse": OFF, "max_batch": args.crowd}
    plain = LLM(args.model, None, **form, **engine)
    llms = {"plain": plain}
    for text in args.drafters.split(";"):
        name, _, k = text.partition("@")
        fixed = {"num_draft_tokens": int(k)} if k else {}
        llms[text] = LLM(plain.target, name, tokenizer=plain.tokenizer, **engine, **fixed)
    prompts = prompts_of(plain, args)
    # a crowd is as at a server: answers differ in length, and who waits takes the seat of who leaves
    lengths = [
        args.max_tokens if args.crowd == 1 else args.max_tokens // 2 + 37 * i % args.max_tokens
        for i in range(len(prompts))
    ]
    asked = [
        (prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    groups = [asked] if args.crowd > 1 else [[each] for each in asked]
    timed(plain, prompts[:1], [SamplingParams(temperature=0, max_tokens=4)])
    ratios: dict[str, list[float]] = {name: [] for name in llms}
    decisions: dict[str, Counter[str]] = {name: Counter() for name in llms}
    speeds, order = [], list(llms)
    for group in groups:
        seconds: dict[str, list[float]] = {name: [] for name in llms}
        texts = []
        for _ in range(args.rounds):
            order = order[1:] + order[:1]
            for name in order:
                took, results = timed(llms[name], *map(list, zip(*group, strict=True)), decoding=bool(args.copying))
                seconds[name].append(took)
                texts.append([result.token_ids for result in results])
                for result in results:
                    decisions[name].update(result.stats.decisions)
        assert all(each == texts[0] for each in texts), "speculation changed a text"
        middle = {name: statistics.median(each) for name, each in seconds.items()}
        speeds.append(sum(each.max_tokens or 0 for _, each in group) / middle["plain"])
        for name in llms:
            ratios[name].append(middle["plain"] / middle[name])
    print(
        f"{args.model} {args.format}, {len(prompts)} prompts, {args.crowd} at a time, {args.max_tokens} tokens,",
        end=" ",
    )
    print(f"{plain.target.kernels}, {torch.get_num_threads()} threads; plain {statistics.median(speeds):.1f} tokens/s")
    for name, own in ratios.items():
        if name != "plain":
            mean = math.exp(statistics.fmean(map(math.log, own)))
            slow = sum(each < 0.98 for each in own)
            print(f"{name:32} mean {mean:.3f} median {statistics.median(own):.3f}", end=" ")
            print(f"least {min(own):.2f} (of prompt {own.index(min(own))})", end=" ")
            print(f"below 0.98: {slow} of {len(own)}; {dict(decisions[name].most_common(4))}", flush=True)


if __name__ == "__main__":
    main()
