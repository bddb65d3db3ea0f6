"""The cost of a number format: a model's distributions beside those of the same model in float32.

The float32 model is the one that the files stand for, dequantized where they are quantized. Texts are given to both,
and at every position that is scored their next-token distributions are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.config import PREFILL_CHUNK, QUANTISATIONS, UNQUANTIZED, SamplingParams
from forerun.engine import LLM
from forerun.errors import ConfigError
from forerun.kernels.cpu import native
from forerun.lab.bench.prompts import BenchPrompt, check_lengths
from forerun.lab.bench.tables import Columns
from forerun.models import LanguageModel, Rows, load_model
from forerun.models.loading.source import find_source

INT8_CACHE = "bfloat16, int8 keys and values"
STORED = "as stored"
"""The types of a GGUF file's weights."""
FORMATS = (STORED, "bfloat16", INT8_CACHE, *QUANTISATIONS)
REFERENCE = "float32"
DRAFTER = "suffix"
"""Of the float32 model while it writes its answers: the text is that of plain decoding."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A text that is scored.

    Attributes:
        token_ids: of the whole of it.
        first: the index of the first token whose probability counts, at least 1.
    """

    token_ids: list[int]
    first: int


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One number format on one workload, beside float32.

    Attributes:
        workload: its name.
        number_format: of the weights, or INT8_CACHE or STORED.
        tokens: that were scored.
        perplexity: of these.
        reference_perplexity: of these in float32.
        lost: perplexity over that in float32, minus 1.
        lost_error: standard error of `lost`, the tokens taken as independent.
        divergence: mean Kullback-Leibler divergence from the float32 distribution, in nats.
        agreement: share of positions whose most probable token is that of float32.
    """

    workload: str
    number_format: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    lost: float
    lost_error: float
    divergence: float
    agreement: float


COLUMNS: Columns[QualityRow] = {
    "workload, weights": lambda row: f"{row.workload}, {row.number_format}",
    "tokens": lambda row: f"{row.tokens:,}",
    "perplexity": lambda row: f"{row.perplexity:.3f}",
    "in float32": lambda row: f"{row.reference_perplexity:.3f}",
    "lost %": lambda row: f"{100 * row.lost:.2f} ± {100 * row.lost_error:.2f}",
    "KL, nats": lambda row: f"{row.divergence:.5f}",
    "top-1 agreement %": lambda row: f"{100 * row.agreement:.2f}",
}


def compare_formats(
    name: str | Path,
    formats: Sequence[str],
    texts: Callable[[LLM], Mapping[str, Sequence[Scored]]],
    adapter: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[QualityRow]:
    """Compare each format with float32 on each workload. Two models are in memory at a time.

    Args:
        name: of the model.
        formats: "bfloat16", INT8_CACHE, STORED, or names of `quantize`.
        texts: gives the texts of each workload; it may let the float32 model write.
        adapter: the folder of a LoRA adapter to merge.

    Raises:
        ConfigError: the model is a folder of quantized values, as `forerun quantize` writes it.
    """
    say(f"loading {name} in {REFERENCE}")
    source = find_source(name)
    if (stored := source.quantization()) is not None:
        raise ConfigError(
            f"{name} holds {stored} weights, and no numbers in {REFERENCE} to compare them with. "
            "Give the model that they were made from; or write what they stand for as numbers: forerun export hf."
        )
    llm = LLM(name, DRAFTER, dtype=REFERENCE, adapter=adapter, quantize=UNQUANTIZED)
    workloads = texts(llm)
    rows = []
    for number_format in formats:
        if number_format == INT8_CACHE and native() is None:  # whose caches alone have formats of choice
            continue
        if number_format == STORED and (adapter is not None or source.file_type() is None):
            continue
        say(f"measuring {number_format}")
        if number_format == INT8_CACHE:
            model = load_model(name, adapter=adapter, quantize=UNQUANTIZED, kv_cache_dtype="int8")
        elif number_format == STORED:
            model = load_model(name)
        elif number_format in QUANTISATIONS:
            model = load_model(name, adapter=adapter, quantize=number_format)
        else:
            model = load_model(name, number_format, adapter=adapter, quantize=UNQUANTIZED)
        rows += [compared(llm.target, model, each, number_format, scored) for each, scored in workloads.items()]
    return rows


def scored_texts(llm: LLM, workloads: Mapping[str, Sequence[BenchPrompt]], max_tokens: int) -> dict[str, list[Scored]]:
    """Return the texts to score: a prompt with its known continuation, from the second token on; else with the model's
    greedy answer.

    Raises:
        ConfigError: a prompt and its answer exceed the context.
    """
    target = llm.target
    context = llm.target.context_length
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    found: dict[str, list[Scored]] = {}
    for name, requests in workloads.items():
        known = [request for request in requests if request.reference]
        unknown = [request for request in requests if not request.reference]
        check_lengths(unknown, max_tokens, context, target.name)
        after = [llm.tokenizer.encode(request.reference, add_special_tokens=False) for request in known]
        found[name] = [
            Scored([*request.token_ids, *more][:context], 1) for request, more in zip(known, after, strict=True)
        ]
        prompts = [request.token_ids for request in unknown]
        answers = llm.generate(prompts, params) if prompts else []
        for prompt, answer in zip(prompts, answers, strict=True):
            found[name].append(Scored([*prompt, *answer.token_ids], len(prompt)))
    return found


def compared(
    reference: LanguageModel, model: LanguageModel, workload: str, number_format: str, texts: Sequence[Scored]
) -> QualityRow:
    """Compare one model with another of the same tokens, on some texts."""
    before: list[float] = []
    after: list[float] = []
    divergences: list[float] = []
    same = 0
    for text in texts:
        for (tokens, theirs), (_, ours) in zip(_logprobs(reference, text), _logprobs(model, text), strict=True):
            before += theirs.gather(1, tokens)[:, 0].neg().tolist()
            after += ours.gather(1, tokens)[:, 0].neg().tolist()
            divergences += F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1).tolist()
            same += int((ours.argmax(1) == theirs.argmax(1)).sum())
    more = [ours - theirs for ours, theirs in zip(after, before, strict=True)]
    ratio = math.exp(statistics.fmean(more))
    error = ratio * statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return QualityRow(
        workload,
        number_format,
        len(more),
        math.exp(statistics.fmean(after)),
        math.exp(statistics.fmean(before)),
        ratio - 1,
        error,
        statistics.fmean(divergences),
        same / len(more),
    )


def _logprobs(model: LanguageModel, text: Scored) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scored tokens, [R, 1], with the log-probabilities, [R, V] in float64, before each: a part at a time."""
    # the last token is given to no model
    cache = model.new_cache()
    last = len(text.token_ids) - 1
    for start in range(0, last, PREFILL_CHUNK):
        end = min(start + PREFILL_CHUNK, last)
        scored = text.token_ids[max(start + 1, text.first) : end + 1]
        logits = model.forward([Rows(cache, text.token_ids[start:end], num_logits=len(scored))]).logits
        cache.commit(range(end - start))
        yield torch.tensor(scored, dtype=torch.int64)[:, None], logits.double().log_softmax(-1).cpu()
