"""Results as a measurement would write them, without one."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.kernels.provenance import Environment
from forerun.lab.results.schema import DrafterFacts, Figure, PromptFacts, Results, RunRow, TableFacts, TargetFacts

SUFFIX = "forerun, suffix, auto"
PLAIN = "forerun, plain"
QUIET = Environment(
    forerun="0.1.0",
    torch="2.13.0",
    transformers="5.23.0",
    python="3.11.7",
    commit="abc1234567",
    dirty=False,
    system="Linux x86_64",
    processor="Some Processor",
    instructions="AVX512",
    kernels="native avx512",
    cores=2,
    threads=2,
    accelerator=None,
    date="2026-11-23T04:00:00Z",
    seconds=61.0,
    load_before=(0.05, 0.1, 0.1),
    load_after=(1.9, 0.5, 0.2),
    stolen=0.0,
    others=0.01,
)


def generated(
    num_prompts: int = 12,
    *,
    slower: Mapping[str, float] | None = None,
    accepted: int = 3,
    noise: float = 0.0,
    category: bool = True,
) -> Results:
    """Whole generations of 20 tokens on prompts of rising length, plain decoding at 10 tokens/s and suffix at 20.

    Args:
        slower: method -> factor of its seconds.
        accepted: of four draft tokens, of the first five drafts of each run; of the others none.
        noise: of every other prompt, the share by which suffix is slower, of the others faster.
    """
    slower = slower or {}
    prompts = [
        PromptFacts(f"p{place}", "mine.jsonl", "xy"[place % 2] if category else "", 40 + 40 * place, f"d{place}")
        for place in range(num_prompts)
    ]
    rows = []
    for place in range(num_prompts):
        sign = 1 + noise * (1 if place % 2 else -1)
        rows.append(RunRow(place, PLAIN, "", 0.0, 0, 20, 2.0 * slower.get(PLAIN, 1.0), 20, first_token=0.1))
        rows.append(
            RunRow(
                place,
                SUFFIX,
                "suffix",
                0.0,
                0,
                20,
                1.0 * sign * slower.get(SUFFIX, 1.0),
                20 - 5 * accepted,
                20,
                5 * accepted,
                (5, 5, 5, 5),
                tuple(5 if depth < accepted else 0 for depth in range(4)),
                0.1,
                True,
            )
        )
    labels: dict[str, str | float] = {"workload": "mine.jsonl", "category": "", "temperature": 0.0}
    figures = [
        Figure("over_plain", {**labels, "method": PLAIN}, 1.0, 1.0, 1.0, num_prompts),
        Figure("over_plain", {**labels, "method": SUFFIX}, 2.0, 1.8, 2.1, num_prompts),
        Figure("over_plain", {**labels, "method": SUFFIX, "category": "x"}, 2.0, 1.7, 2.2, num_prompts),
        Figure("over_plain", {**labels, "method": SUFFIX, "category": "y"}, 2.1, 1.8, 2.2, num_prompts),
    ]
    return Results(
        "generate",
        "forerun bench generate --prompts mine.jsonl",
        QUIET,
        TargetFacts("bundled", "bfloat16", exact=True),
        {"max_tokens": 20},
        [DrafterFacts("suffix", "suffix", ["auto"])],
        prompts,
        rows,
        figures,
        [TableFacts("bundled, mine.jsonl", ["method", "tokens/s"], [[PLAIN, "10.0"], [SUFFIX, "20.0 | a"]])],
        source="folder/new.json",
    )


def beside_others() -> Results:
    """forerun, llama.cpp whose look-up is slower than its draft model, and an engine that was left out."""
    figures = []
    for peer, drafter, speed, first, same in (
        ("forerun Q4_K_M", "plain", 20.0, 0.1, 1.0),
        ("forerun Q4_K_M", "suffix", 40.0, 0.1, 1.0),
        ("llama.cpp", "plain", 10.0, 0.2, 0.25),
        ("llama.cpp", "prompt lookup", 12.0, 0.2, 0.25),
        ("llama.cpp", "draft model", 15.0, 0.2, 0.25),
    ):
        labels = {"method": f"{peer}, {drafter}", "peer": peer, "drafter": drafter}
        figures += [
            Figure("tokens_per_second", labels, speed, speed - 1, speed + 1, 4),
            Figure("decoding", labels, speed, speed - 1, speed + 1, 4),
            Figure("first_token", labels, first, first - 0.01, first + 0.01, 4),
            Figure("same_as_forerun", labels, same, samples=4),
            Figure("shared_prefix", labels, 7.0, samples=4),
        ]
    details = {
        "peers": [{"name": "forerun Q4_K_M", "version": "forerun 1"}, {"name": "llama.cpp", "version": "llama.cpp b1"}],
        "left_out": [{"peer": "openvino", "reason": "no such file"}],
    }
    target = TargetFacts("m.gguf", "Q4_K_M")
    return Results("peers", "forerun bench peers", QUIET, target, figures=figures, details=details)


def forwards() -> Results:
    """One forward of 1, 4 and 8 rows beside the roofline."""
    figures = [
        Figure("forward", {"dtype": "int8", "method": "llama", "rows": k}, 0.01 * k, 0.009 * k, 0.012 * k, 20)
        for k in (1, 4, 8)
    ]
    figures += [Figure("roofline", {"dtype": "int8", "method": "roofline", "rows": k}, 0.008) for k in (1, 4, 8)]
    return Results("forward", "forerun bench forward", QUIET, TargetFacts("bundled", "int8"), figures=figures)


def loads() -> Results:
    """A closed loop of 1, 4 and 16 requests."""
    figures = [
        Figure(name, {"part": "loop", "outstanding": n, "method": method}, scale * n**0.5, None, None, 12)
        for name, scale in (("tokens_per_second", 20.0), ("first_token", 0.1))
        for method in ("plain", "auto, suffix")
        for n in (1, 4, 16)
    ]
    return Results("serve", "forerun bench serve", QUIET, TargetFacts("bundled", "int8"), figures=figures)


def qualities() -> Results:
    """What 4 bits cost."""
    labels = {"workload": "prose", "method": "int4"}
    figures = [Figure("perplexity_lost", labels, 0.02, 0.01, 0.03, 900)]
    return Results("quality", "forerun bench quality", QUIET, TargetFacts("bundled", "float32"), figures=figures)
