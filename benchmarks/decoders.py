"""Time the native step of every family of the fused decoder, beside Llama's and Transformers', with AVX-512 and AVX2.

    PYTHONPATH=tests python benchmarks/decoders.py --write                # writes the table of docs/models.md
    PYTHONPATH=tests python benchmarks/decoders.py gemma2 phi3 --instructions avx2

Random models of about 100 million parameters: 12 layers of 768, 12 heads and 4 key heads of 64, 2,048 in between,
32,000 tokens. Steps of 1, 5 and 8 rows after 256 positions, and a prompt of 128 tokens with one row of logits, family
and a Llama with as many key heads in turn. "Of Llama" is seconds over bytes of weights beside Llama's, at most of these
rows and formats; of a mixture, of the experts that were read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from families import DESCRIBED, TINY
from forerun import __version__
from forerun.config import QUANTISATIONS, UNQUANTIZED
from forerun.lab.bench.forward import filled, forward_step
from forerun.lab.bench.measure import interleave
from forerun.lab.bench.methods import Reference, quieten
from forerun.models import Model, load_model
from forerun.models.families.table import spec_of
from forerun.models.fused.native import NativeDecoder

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- table: benchmarks/decoders.py -->", "<!-- end of families -->"
PREFIX, PROMPT, ROWS = 256, 128, (1, 5, 8)
FORMATS = ("bfloat16", "int8", "int4")
COLUMNS = ["family"]
for _format in FORMATS:
    COLUMNS += [f"{_format} ms", "t(5)/t(1)", *(["of Transformers"] if _format == "bfloat16" else [])]
COLUMNS.append("of Llama")
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
OTHERS = {"n_embd": 768, "n_inner": 2048, "n_layer": 12, "n_head": 12, "n_positions": 1024}
OTHERS |= {"ffn_dim": 2048, "ffn_hidden_size": 2048, "shared_intermediate_size": 2048, "word_embed_proj_dim": 768}
OTHERS |= {"num_kv_heads": 4, "rotary_dim": 32}
OTHERS |= {"linear_num_key_heads": 12, "linear_num_value_heads": 12, "linear_key_head_dim": 128}
OTHERS |= {"linear_value_head_dim": 128, "expand": 2, "mamba_expand": 2, "mamba_n_heads": 24, "mamba_d_head": 64}
OTHERS |= {"mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_ssm": 1536, "mamba_num_heads": 24, "mamba_head_dim": 64}
OTHERS |= {"ssm_state_size": 128, "n_groups": 1, "state_size": 128, "num_heads": 24}
OTHERS |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "kv_lora_rank": 192}
OTHERS |= {"q_lora_rank": 384, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
OTHERS |= {"global_head_dim": 128, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 32000}
SMALL = ("sliding_window", "query_pre_attn_scalar")
"""Of the tests' tiny models, what fits no other size."""
Times = dict[tuple[str, int], float]
"""Median seconds by method and rows."""


def write_model(family: str, folder: Path, spread: float = 0.02, **sizes: Any) -> Any:
    """Save a random model of the family in bfloat16, with weights of this standard deviation, and return its
    configuration."""
    config_class = CONFIG_MAPPING[family]
    tiny = TINY[family]
    names = {*config_class().to_dict(), *(tiny.keys() & {"global_head_dim"})}
    if "kv_lora_rank" in names:  # heads have widths of their own
        names.discard("head_dim")
        sizes = {"num_key_value_heads": 12, **sizes}
    kept = {name: tiny[name] for name in tiny if name not in SIZES | OTHERS and name not in SMALL}
    layers = {name: (each * 12)[:12] for name, each in kept.items() if isinstance(each, list) and "layer" in name}
    config = config_class(
        **{name: size for name, size in (SIZES | OTHERS).items() if name in names} | kept | layers | sizes
    )
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return config


def of_format(folder: Path, number_format: str) -> tuple[Model, NativeDecoder]:
    """Load a model in a number format, computed by the native decoder."""
    quantize = number_format if number_format in QUANTISATIONS else UNQUANTIZED
    model = load_model(folder, "bfloat16", quantize=quantize)
    assert isinstance(model.decoder, NativeDecoder), f"{folder.name}: {model.kind} decoder"
    return model, model.decoder


def of_transformers(reference: Any, tokens: list[int], length: int) -> Callable[[], None]:
    """Return the computation of a prompt of this length, or of one more token after a prefix: a state cannot be taken
    back."""
    cache = tf.DynamicCache(config=reference.model.config)
    reference.model(torch.tensor([tokens[:PREFIX]]), past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def step() -> None:
        given = {"past_key_values": cache} if length == 1 else {}
        reference.model(torch.tensor([tokens[:length]]), use_cache=True, logits_to_keep=1, **given)

    return step


def bytes_read(decoder: NativeDecoder, step: Callable[[], object]) -> float:
    """Return the bytes of weights that a step reads."""
    before = decoder.num_experts_read
    step()
    per_row = sum(experts.num_experts_per_tok for experts in decoder._experts)
    return decoder.weight_bytes + (decoder.num_experts_read - before - per_row) * decoder.expert_nbytes


def measure(family: Path, llama: Path, number_format: str, rounds: int) -> tuple[Times, Times]:
    """Return the times of "family", "llama" and, in bfloat16, "transformers", and the bytes of weights that a step of
    family and Llama reads; of a prompt, those that a row does."""
    steps: dict[tuple[str, int], Callable[[], Tensor]] = {}
    nbytes: Times = {}
    for method, folder in (("family", family), ("llama", llama)):
        model, decoder = of_format(folder, number_format)
        tokens = torch.randint(0, model.vocab_size, (PREFIX + PROMPT,)).tolist()
        cache = filled(model, tokens[:PREFIX])
        for rows in (*ROWS, PROMPT):
            logits = rows if rows < PROMPT else 1
            step = steps[method, rows] = forward_step(model, cache, tokens[PREFIX : PREFIX + rows], logits)
            nbytes[method, rows] = bytes_read(decoder, step) if rows < PROMPT else nbytes[method, 1]
    if number_format == "bfloat16":
        steps["transformers", 1] = of_transformers(Reference(family, number_format), tokens, 1)
    timed = interleave(steps, rounds, warmup=2)
    return {key: median(run.seconds for run in runs) for key, runs in timed.items()}, nbytes


def figures(folder: Path, llama: Path, rounds: int, threads: int) -> list[str]:
    """Return the cells of a family's row, measured with one instruction set."""
    quieten()
    torch.set_num_threads(threads)
    cells, most = [], 0.0
    for number_format in FORMATS:
        times, read = measure(folder, llama, number_format, rounds)
        first = times["family", 1]
        cells += [f"{1e3 * first:.1f}", f"{times['family', 5] / first:.2f}"]
        if number_format == "bfloat16":
            cells.append(f"{first / times['transformers', 1]:.2f}")
        rates = [{key: times[key] / read[key] for key in read if key[1] == rows} for rows in (*ROWS, PROMPT)]
        over = [each["family", rows] / each["llama", rows] for each, rows in zip(rates, (*ROWS, PROMPT), strict=True)]
        print(f"    {folder.name} {number_format}, of Llama: {', '.join(f'{each:.2f}' for each in over)}", flush=True)
        most = max(most, *over)
    return [*cells, f"{most:.2f}"]


def main() -> None:
    """Measure the families of the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=DESCRIBED)
    parser.add_argument("--instructions", nargs="*", default=["avx512bf16", "avx2"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the table to docs/models.md")
    options = parser.parse_args()
    quieten()
    torch.manual_seed(0)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as root:
        for family in options.families:
            folder = Path(root) / "family" / family
            attention = spec_of(write_model(family, folder)).attention
            num_kv_heads = 1 if attention is None else attention.num_kv_heads
            llama, found = Path(root) / f"llama-{num_kv_heads}", []
            if not llama.exists():
                write_model("llama", llama, num_key_value_heads=num_kv_heads)
            for instructions in options.instructions:
                os.environ["FORERUN_INSTRUCTIONS"] = instructions
                with context.Pool(1) as pool:
                    found.append(pool.apply(figures, (folder, llama, options.rounds, options.threads)))
            shutil.rmtree(folder)
            lines.append(f"| `{family}` | {' | '.join(map('/'.join, zip(*found, strict=True)))} |")
            print(lines[-1], flush=True)
    if options.write:
        versions = f"forerun {__version__}, torch {torch.__version__}, transformers {tf.__version__}"
        made = f"{'/'.join(options.instructions)}, {options.threads} threads, {versions}.\n\n" + "\n".join(lines)
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(START)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{START}\n\n{made}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
