"""The commands that train and measure heads: from data and a target to a head's folder with its card."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from forerun.config import SamplingParams
from forerun.drafters import Binding, Drafter
from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import load_head, save_head
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.heads.fingerprint import check_target, target_fingerprint
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.engine import LLM
from forerun.engine.step_times import step_costs
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.models import LanguageModel, load_model, number_format
from forerun.speculation.predictor import CostsByK
from forerun.train.accelerator import device_name, dtype_name, product_type, reuse_memory, training_device
from forerun.train.block import BlockKind
from forerun.train.checkpoint import DTYPE, LoopState, run_in, run_type
from forerun.train.data.answer_rows import read_rows, target_tokenizer
from forerun.train.data.packed import PackedDocument, PackedShard, frequent_tokens, pack, token_counts
from forerun.train.defaults import AUTO
from forerun.train.eagle import EagleKind
from forerun.train.heads.card import PICTURE, REMEDY, HeadReport, draw_curves, head_record, write_head_card
from forerun.train.heads.evaluate import HeldOut, cell_text
from forerun.train.heads.module import HeadModule
from forerun.train.heads.options import BlockTraining, EagleTraining, MedusaTraining
from forerun.train.heads.run import RATE, STATES, learning_rate, run_training
from forerun.train.heads.start import HeadKind, target_config
from forerun.train.heads.target_states import TrainingTarget
from forerun.train.medusa import MedusaKind
from forerun.utils import workloads
from forerun.utils.files import remove
from forerun.utils.vocabulary import encode_text

FINAL_ROWS = 400
"""Held-out rows of the evaluation that goes to the card, at most."""
_FIRST_ROWS = 4
"""Rows whose states determine the first weights."""
CONTEXT = 256
"""Tokens of the prompt of timed steps, at most."""
TOKENS = 24
"""Of each generation that is timed."""
WINDOW = 512
"""Tokens of a row, less one, into which answers are packed for an evaluation."""
_KINDS: dict[type, Callable[[], HeadKind[Any]]] = {
    EagleConfig: lambda: EagleKind(EagleTraining()),
    BlockConfig: lambda: BlockKind(BlockTraining()),
    MedusaConfig: lambda: MedusaKind(MedusaTraining()),
}


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run before its first step, or a stored head that is measured.

    Attributes:
        vocabulary: [V] ids of the target's tokens that the head proposes.
        coverage: their share of the tokens that are learnt.
    """

    inference_target: LanguageModel
    target: TrainingTarget
    rows: PackedShard
    head: HeadModule
    vocabulary: Tensor
    coverage: float
    kind: HeadKind[Any]

    def stored(self) -> StoredHead[HeadConfig]:
        """Return the head as a folder holds it."""
        config = self.head.config
        tensors = {name: parameter.detach().cpu() for name, parameter in self.head.named_parameters()}
        is_part = config.draft_vocab_size < config.vocab_size
        return StoredHead(config, tensors, self.vocabulary - torch.arange(len(self.vocabulary)) if is_part else None)

    def held_out(self, count: int, num_draft_tokens: int, console: Console, *, is_kept: bool = False) -> HeldOut:
        """Lay out so many held-out rows, for drafts of K tokens (`HeldOut`)."""
        of = self.target, self.rows.held_out(), count, self.vocabulary, num_draft_tokens, self.kind.predict
        return HeldOut(*of, console, is_kept=is_kept)


def train_head(
    out: Path,
    work: Path,
    name: str,
    data: Path,
    kind: HeadKind[Any],
    command: str,
    *,
    resume: bool,
    force: bool,
) -> bool:
    """Train a head, save it to `out`, measure it on held-out answers, write the card.

    Args:
        name: of the target, as `load_model` takes it.
        data: see `read_rows`.
        command: the command line, for the card.

    Returns:
        Whether the head is no better than chance (`HeadScore.is_chance`).
    """
    console = Console()
    options = kind.options
    if options.threads:
        torch.set_num_threads(options.threads)
    with run_in(work, out, console, resume=resume, force=force):
        start = prepare_head(name, data, work, kind, console)
        k = kind.num_draft_tokens
        during = start.held_out(options.held_out_rows, k, console, is_kept=True)
        evaluate = _evaluation(during, console) if during else None
        state = run_training(start.head, start.target, start.rows, work, kind, console, evaluate)
        last = during if options.minutes else start.held_out(FINAL_ROWS, k, console)
        kind.finish(start.head, lambda count: start.held_out(options.held_out_rows, count, console))
        report = measure_head(start, last, k)
        record = _record(start, state, report, command)
        head = start.stored()
        model = start.inference_target
        fingerprint = target_fingerprint(model)
        form = number_format(model)
        save_head(out, head.config, head.tensors, head.d2t, record, fingerprint=fingerprint, number_format=form)
        has_picture = draw_curves(work, out)
        write_head_card(out, record, report, PICTURE if has_picture else None)
        if state.is_finished:
            remove(work / STATES)
        for line in ([] if has_picture else [REMEDY]) + report.lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return report.score.is_chance


def _record(start: PreparedRun, state: LoopState, report: HeadReport, command: str) -> dict[str, Any]:
    """Collect the content of a trained head's card."""
    model = start.inference_target
    options = start.kind.options
    chosen = {DTYPE: dtype_name(start.target.dtype), RATE: learning_rate(options, start.head.config)}
    return head_record(
        command=command,
        target={"name": model.name, "number_format": number_format(model)},
        config=start.head.config,
        options=asdict(options) | chosen,
        rows=start.rows,
        coverage=start.coverage,
        state=state,
        report=report,
        parameters=sum(parameter.numel() for parameter in start.head.parameters()),
        device=device_name(start.target.output_rows.device),
    )


def _evaluation(held_out: HeldOut, console: Console) -> Callable[[HeadModule], float]:
    """Return a function that scores a head during its training, and prints the measurement."""

    def evaluate(head: HeadModule) -> float:
        found = held_out.score(head)
        greedy = cell_text(found.per_position) if found.reached[0] else "drawn, no answer is greedy"
        length = f"mean acceptance length {found.score:.3f} ({greedy})"
        console.print(f"{length}, overlap {cell_text(found.overlap)}", highlight=False)
        return found.score

    return evaluate


def prepare_head(name: str, data: Path, work: Path, kind: HeadKind[Any], console: Console) -> PreparedRun:
    """Load the target, read the data, and set the head's first weights.

    Raises:
        ConfigError: the target has no tokenizer.
    """
    options = kind.options
    where = training_device(options.device)
    dtype = run_type(work, options.dtype, where, console)
    reuse_memory()
    inference_target = load_model(name, device=where)
    tokenizer = target_tokenizer(name)
    rows = read_rows(data, inference_target, tokenizer, work / "packed", options.window, console)
    config = kind.config(name, inference_target, rows.window)
    counts = token_counts(rows, rows.vocab_size)
    vocabulary = frequent_tokens(counts, config.draft_vocab_size, inference_target.eos_token_ids)
    target = TrainingTarget.of(inference_target, config.layers, vocabulary, dtype)
    first = rows.batch(0, _FIRST_ROWS, options.seed)
    document = first.tokens[0][first.documents[0] == 0]
    head = kind.module(config)
    kind.set_first_weights(head, target.states.of(document, [len(document)])[1:, -1], target.output_rows)
    coverage = float(counts[0][vocabulary].sum() / counts[0].sum())
    return PreparedRun(inference_target, target, rows, head.to(where), vocabulary, coverage, kind)


def measure_head(start: PreparedRun, held_out: HeldOut, num_draft_tokens: int) -> HeadReport:
    """Measure score and costs of a head."""
    first = start.rows.batch(0, 1, 0)
    prompt = first.tokens[0][first.documents[0] == 0].tolist()
    costs = head_costs(start.inference_target, start.kind.drafter(start.stored()), prompt, num_draft_tokens)
    return HeadReport.of(held_out.score(start.head), costs)


@torch.no_grad()
def head_costs(model: LanguageModel, head: Drafter, prompt: Sequence[int], num_draft_tokens: int) -> CostsByK:
    """Measure the seconds of the engine's steps with a head as the drafter, by the tokens of its drafts.

    Args:
        head: not yet bound to the target.
        prompt: text of the head's domain; its first CONTEXT tokens, and at most half of the target's context, are read.
    """
    head.bind(Binding(model, None, 0))
    most = min(CONTEXT, model.context_length // 2)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return step_costs(model, None, lambda: head, num_draft_tokens, prompt[:most], params)


def evaluate_head(
    name: str,
    folder: Path,
    data: Path | None,
    *,
    num_draft_tokens: int,
    new_tokens: int = 128,
    threads: int = 0,
    device: str | None = None,
) -> HeadReport:
    """Measure a stored head of any form on held-out answers.

    Args:
        name: of the target, as `load_model` takes it.
        data: as for training, of which the held-out part is read. None: the target's greedy continuations of the
            bundled prompts, by `new_tokens` each.

    Raises:
        ModelLoadError: there is no head, or it is damaged.
        IncompatibleDrafterError: it is one for another target.
        ConfigError: nothing of the data is held out.
    """
    if threads:
        torch.set_num_threads(threads)
    reuse_memory()
    where = training_device(device)
    target = load_model(name, device=where)
    tokenizer = target_tokenizer(name)
    stored = load_head(folder, target_config(name).num_hidden_layers)
    make_kind = _KINDS.get(type(stored.config))
    vocabulary = stored.token_ids
    if make_kind is None:
        raise UnsupportedModelError(
            f"{folder} holds a head of the kind {stored.config.kind}, which is not measured here."
        )
    check_target(stored.fingerprint, target, str(folder))
    kind = make_kind()
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "packed"
        if data is None:
            documents = _continuations(target, tokenizer, new_tokens)
            rows = pack(documents, packed, window=WINDOW, vocab_size=target.vocab_size, made_from={})
        else:
            rows = read_rows(data, target, tokenizer, packed, WINDOW, Console(stderr=True)).held_out()
        head = kind.module(stored.config)
        head.load_state_dict(dict(stored.tensors))
        parts = TrainingTarget.of(target, stored.config.layers, vocabulary, product_type(AUTO, where))
        of = parts, rows, FINAL_ROWS, vocabulary, num_draft_tokens, kind.predict
        held_out = HeldOut(*of, Console(stderr=True), is_kept=False)
        if not held_out:
            raise ConfigError(f"{data} has no held-out answers. Give more data, or leave --data out.")
        start = PreparedRun(target, parts, rows, head.to(where), vocabulary, 0.0, kind)
        return measure_head(start, held_out, num_draft_tokens)


def _continuations(target: LanguageModel, tokenizer: Any, new_tokens: int) -> Iterator[PackedDocument]:
    """Continue the bundled prompts at temperature 0."""
    prompts = [encode_text(tokenizer, case.prompt, special=True) for case in workloads.load_workload("code")]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for answer in LLM(target, None).generate(prompts, params):
        before = answer.prompt_token_ids
        wanted = [False] * len(before) + [True] * len(answer.token_ids)
        yield PackedDocument([*before, *answer.token_ids], wanted)
