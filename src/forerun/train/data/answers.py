"""The making of answers: prompts that are given, written by the target or made of text, and the target's answers.

All results of a run are kept in journals in OUT.run; OUT and its record are written at the end, atomically.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun import __version__
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.engine import LLM
from forerun.errors import ConfigError
from forerun.train.data.answer_file import SUFFIXES, AnswerLine, is_answer_file, record_path
from forerun.train.data.answer_prompts import Overlap, cut_prompts, files_digest, read_prompts, split_by_kind
from forerun.train.data.answer_stages import Stages
from forerun.train.data.passages import Passage, prose_pieces, read_passages
from forerun.train.data.prompt_templates import KINDS, from_templates
from forerun.train.defaults import AnswerMaking
from forerun.utils.files import atomic_file, digest, locked, refuse_to_overwrite, remove, write_json
from forerun.utils.json_file import Fields
from forerun.utils.text_files import find_files
from forerun.utils.vocabulary import fingerprint
from forerun.utils.workloads import Case

ANSWERS = 2_000
TEMPLATES_SHARE = 0.4
"""Of prompts made by templates in runs without prompts: small chat models write few prompts of these kinds."""
MANY_CUT = 0.2
"""Share of answers that are cut before it is said."""
_QUESTION_WORDS = 40
"""Words of a prompt that may stand as the question about its answer."""


def make_answers(
    open_llm: Callable[[], LLM],
    out: Path,
    data: Sequence[Path],
    options: AnswerMaking,
    console: Console,
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Write a file of answers and its record, which is returned. A file that the same run has written is kept.

    Args:
        open_llm: loads the target, without a drafter.
        data: JSON lines with prompts, and files and folders of text or source.
        force: begin anew, and replace `out`.

    Raises:
        ConfigError: there is another file or another process at `out`; data cannot be read or holds nothing usable;
            the disk is full. What was computed stays.
    """
    if not is_answer_file(out):
        raise ConfigError(f"{out} must end in {' or '.join(SUFFIXES)}.")
    folder = out.with_name(f"{out.name}.run")
    with locked(out, ConfigError, wait=False, remedy="Wait until that run ends, or give another OUT."):
        if force:
            remove(folder)
        prompts, text = split_by_kind(data)
        overlap = Overlap(options.evaluation)
        llm = open_llm()
        if llm.tokenizer is None:
            raise ConfigError(
                f"{llm.target.name} has no tokenizer, so it cannot be prompted. Put it beside its weights."
            )
        head = _head(llm, prompts, text, options)
        if not force and out.exists() and not folder.exists():
            return _former(out, head, console)
        stages = Stages(llm, folder, head, options, console)
        chat = stages.chat.has_template
        given = read_prompts(prompts, chat=chat)
        if not chat:
            given = _without_chats(given, console)
        made = _compute(stages, llm, plan_prompts(given, text, options, chat=chat), text, options, overlap, console)
        record = _write(out, made, head)
        remove(folder)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in record["kinds"].items())
    console.print(f"{out}: {record['answers']:,} answers, {record['complete']:,} of them complete ({kinds})")
    _report_cut(record["answers"] - record["complete"], record["answers"], options.max_tokens, console)
    return record


def _report_cut(cut: int, of: int, max_tokens: int, console: Console) -> None:
    """Print how many answers were cut, where these are many, and what lets more of them end."""
    if cut > MANY_CUT * of:
        console.print(
            f"{cut:,} of {of:,} answers ({cut / of:.0%}) were cut after {max_tokens} tokens, so that a drafter learns "
            f"no endings. --max-tokens {4 * max_tokens} lets more of them end, with --force.",
            soft_wrap=True,
            highlight=False,
        )


def plan_prompts(
    given: list[Case], text: list[Path], options: AnswerMaking, *, chat: bool
) -> tuple[list[Case], int, int]:
    """Choose the number of prompts of each origin.

    Returns:
        The given prompts to answer; the number of prompts for the target to write, or to be cut from text for a raw
        target; and the number to be made by templates.

    Raises:
        ConfigError: a share that the target cannot have.
    """
    share = options.mixture_share
    if share and not chat:
        raise ConfigError("mixture_share makes users' messages, but the target has no chat template. Leave it out.")
    if share is None:
        share = 0.0 if given or not chat else TEMPLATES_SHARE
    if share == 1 and not text:
        raise ConfigError("mixture_share is 1, but there is no text to make prompts of. Give text with --data.")
    turns = sum(max(1, len(case.turns)) for case in given)
    total = options.answers or (round(turns / (1 - share)) if given and share < 1 else ANSWERS)
    num_templates = round(total * share)
    if not given:
        return [], total - num_templates, num_templates
    kept: list[Case] = []
    for case in given:
        if sum(max(1, len(each.turns)) for each in kept) >= total - num_templates:
            break
        kept.append(case)
    return kept, 0 if chat or not text else max(0, total - turns), num_templates


def _compute(
    stages: Stages,
    llm: LLM,
    planned: tuple[list[Case], int, int],
    text: list[Path],
    options: AnswerMaking,
    overlap: Overlap,
    console: Console,
) -> list[AnswerLine]:
    """Run all stages, one after another."""
    cases, own, count = planned
    if own:
        chat = stages.chat.has_template
        cases = [*cases, *(stages.own_prompts(own) if chat else cut_prompts(text, llm.tokenizer, own))]
    cases = _without_overlap(cases, overlap, options, console, "prompts")
    if not cases and not count:
        raise ConfigError("The data holds no usable prompt. Give other or more data with --data.")
    made = stages.answers("answers", cases) if cases else []
    if count:
        prose, code = _passages(text, made)
        prompts = from_templates(prose, code, options.kind or tuple(KINDS), count, options.seed)
        prompts = _without_overlap(prompts, overlap, options, console, "prompts of the mixture")
        made += stages.answers("mixture", prompts)
    kept = [each for each in made if options.keep_overlap or (each.answer or "") not in overlap]
    if len(kept) < len(made):
        console.print(f"answers: {len(made) - len(kept):,} left out: 13 words in a row of prompts for evaluation")
    if not kept:
        raise ConfigError(f"{llm.target.name} gave no answer that can be used. Give other prompts with --data.")
    return kept


def _passages(text: list[Path], made: Iterable[AnswerLine]) -> tuple[list[Passage], list[Passage]]:
    """Read (prose, code) of the given text; without any, of the target's own answers and of the standard library."""
    if text:
        return read_passages(text)
    own = []
    for each in made:
        prompt = each.prompt[-1]["content"] if isinstance(each.prompt, list) else each.prompt
        question = prompt if len(prompt.split()) <= _QUESTION_WORDS else ""
        own += [Passage(piece, question=question) for piece in prose_pieces(each.answer or "")]
    prose, code = read_passages([])
    return own or prose, code


def _without_overlap(
    cases: list[Case], overlap: Overlap, options: AnswerMaking, console: Console, what: str
) -> list[Case]:
    """Leave out the cases that share text with those for evaluation, and print how many do."""
    sharing = [
        any(text in overlap for text in (case.prompt, *(each["content"] for each in case.messages), *case.turns))
        for case in cases
    ]
    kept = cases if options.keep_overlap else [case for case, shares in zip(cases, sharing, strict=True) if not shares]
    fate = ", and are left out" if any(sharing) else ""
    if options.keep_overlap:
        fate = ", and are kept"
    console.print(
        f"{what}: {sum(sharing):,} of {len(cases):,} share 13 words in a row with the {overlap.num_prompts:,} prompts "
        f"for evaluation{fate}",
        soft_wrap=True,
        highlight=False,
    )
    return kept


def _without_chats(cases: list[Case], console: Console) -> list[Case]:
    """Leave out the chats, which a target without a chat template cannot answer."""
    kept = [case for case in cases if not case.is_chat]
    if len(kept) < len(cases):
        console.print(f"prompts: {len(cases) - len(kept):,} chats left out: the target has no chat template")
    return kept


def _head(llm: LLM, prompts: Sequence[Path], text: Sequence[Path], options: AnswerMaking) -> dict[str, Any]:
    """Return the inputs that the answers depend on."""
    read = find_files(text, remedy="Give files or folders of text or source.") if text else []
    plain = {key: value for key, value in asdict(options).items() if key != "max_batch"}
    return {
        "target": target_fingerprint(llm.target),
        "dtype": str(llm.target.dtype),
        "quantize": llm.target.quantize,
        "tokenizer": fingerprint(llm.tokenizer),
        "template": digest(str(getattr(llm.tokenizer, "chat_template", None)).encode()),
        "data": files_digest([*prompts, *(path for path, _ in read)]),
        "forerun": __version__,
        **json.loads(json.dumps(plain)),
    }


def _former(out: Path, head: dict[str, Any], console: Console) -> dict[str, Any]:
    """Return the record of a file that the same run has written. Raises ConfigError for any other file."""
    path = record_path(out)
    if path.exists():
        record = dict(Fields.read(path, ConfigError).values)
        if record.get("run") == head:
            console.print(f"{out} holds these answers already", highlight=False)
            return record
    refuse_to_overwrite(out, ConfigError)
    return {}


def _write(out: Path, made: Sequence[AnswerLine], head: dict[str, Any]) -> dict[str, Any]:
    """Write file and record. The bytes depend on the answers alone (no time stamp)."""
    lines = "".join(json.dumps(each.record(), ensure_ascii=False) + "\n" for each in made).encode()
    with atomic_file(out, ConfigError) as file:
        file.write(gzip.compress(lines, mtime=0) if out.suffix == ".gz" else lines)
    record = {
        "run": head,
        "answers": len(made),
        "complete": sum(each.complete for each in made),
        "sampled": sum(each.temperature > 0 for each in made),
        "kinds": dict(Counter(each.kind for each in made).most_common()),
    }
    write_json(record_path(out), record, error=ConfigError)
    return record
