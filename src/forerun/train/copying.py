"""Whether a model copies: a span of held-out code, a blank line, the span's first lines again, and then?

Greedy decoding goes on with the copy until its first token that is not the span's, so one forward over
the whole of it tells how far: nothing has to be generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.train import attention
from forerun.train.corpus import SourceFile, hash_fraction

SPAN_LINES = 30
SHOWN_LINES = 4
"""Lines of the span that the prompt repeats."""
MAX_TOKENS = 1_900


@dataclass(frozen=True, slots=True)
class CopyScore:
    """How far greedy decoding follows a repeated span, averaged over files.

    `lines` is the share of the lines still to come that are copied before the first other token,
    `whole` the share of files whose span is copied to its end, `characters` the mean number copied in
    a row, `tokens` the share of the span's tokens that are the most probable ones after the span's own
    (mistakes do not end that count).
    """

    lines: float
    whole: float
    characters: float
    tokens: float
    files: int


def spans(files: Sequence[SourceFile]) -> list[str]:
    """One span of `SPAN_LINES` lines from every file long enough, placed by a hash of the file's name."""
    cut = []
    for file in files:
        lines = file.text.splitlines(keepends=True)
        if len(lines) >= 2 * SPAN_LINES:
            start = int(hash_fraction(f"span in {file.name}") * (len(lines) - SPAN_LINES))
            cut.append("".join(lines[start : start + SPAN_LINES]))
    return cut


@torch.inference_mode()
def copying(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: Sequence[SourceFile]) -> CopyScore:
    """How far `model` follows repeated spans of `files`."""
    lines, whole, characters, right = [], [], [], []
    for span in spans(files):
        shown = "".join(span.splitlines(keepends=True)[:SHOWN_LINES])
        before = _ids(tokenizer, span + "\n" + shown)
        together = _ids(tokenizer, span + "\n" + span.rstrip("\n"))
        # The last token of the prompt may reach over the line end; then the copy starts a token earlier.
        start = _common(before, together)
        if len(together) > MAX_TOKENS:
            continue
        attention.use_for(model, len(together))
        ids = torch.tensor([together], device=model.device)
        guessed = model(input_ids=ids[:, :-1], use_cache=False).logits[0, start - 1 :].argmax(-1).tolist()
        wanted = together[start:]
        run = _common(guessed, wanted)
        copied = str(tokenizer.decode(wanted[:run]))
        to_come = span.rstrip("\n").count("\n") + 1 - SHOWN_LINES
        whole.append(float(run == len(wanted)))
        lines.append(1.0 if whole[-1] else min(1.0, copied.count("\n") / max(to_come, 1)))
        characters.append(len(copied))
        right.append(sum(a == b for a, b in zip(guessed, wanted, strict=True)) / len(wanted))
    count = max(len(lines), 1)
    return CopyScore(sum(lines) / count, sum(whole) / count, sum(characters) / count, sum(right) / count, len(lines))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(tokenizer.eos_token_id), *tokenizer(text, verbose=False)["input_ids"]]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
