"""`forerun bench peers`: compare forerun with Transformers, OpenVINO GenAI and llama.cpp, each in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.bench.shared import CompareOptions, JsonFile, begin, print_report, say
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import INTERRUPTED
from forerun.cli.options import LLMOptions, choose_drafters, chosen_model
from forerun.config import AUTO
from forerun.errors import ConfigError
from forerun.lab.results.files import without_folders
from forerun.lab.results.schema import TargetFacts
from forerun.utils.fields import option
from forerun.utils.machine import features, performance_cores


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Which engines are compared."""

    peer: Sequence[str] = option(
        (),
        "transformers=PYTHON, openvino=PYTHON or forerun=PYTHON (an interpreter that has it), or llama.cpp=FOLDER (of "
        "llama-server); after a colon, with commas between them: model=PATH, draft=PATH, name=TEXT, lookup=VALUE, "
        "dtype=VALUE, instructions=VALUE.",
        metavar="KIND=PROGRAM",
    )
    rounds: int = option(1, "Interleaved rounds per prompt.", low=1)


@with_flags
def peers(
    *,
    model: options.TargetArgument = None,
    compared: Annotated[CompareOptions, Flags(base=CompareOptions(drafters=AUTO))],
    chosen: Annotated[PeerOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize")],
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Run the same token ids, threads and numbers of tokens through other engines: greedy, up to the end of forerun's
    plain answer."""
    from forerun.lab.bench.peers.rows import peers_report
    from forerun.lab.bench.peers.run import Peers, answer_of, own_start, read_specs, run_peers, start_of
    from forerun.lab.bench.prompts import check_lengths, requests
    from forerun.lab.bench.random_model import RANDOM, opened
    from forerun.models import find_tokenizer

    if not chosen.peer:
        raise ConfigError("There is no peer to measure beside. Give at least one: --peer transformers=PYTHON.")
    specs = read_specs(chosen.peer)
    cases = [case for each in compared.cases().values() for case in each]
    model = chosen_model(model)
    drafters = choose_drafters(model, None, compared.drafters)
    count = threads or performance_cores()
    watch = begin(count, json)
    with opened(model, llm.quantize or llm.dtype, say) as name, closing(Peers(say)) as started:
        tokenizer = find_tokenizer(name)
        start = own_start(name, drafters, llm.dtype, count, llm.quantize)
        own = started.start(start)
        if own is None:
            raise ConfigError(f"forerun itself cannot take part: {started.left_out[-1].reason}.")
        prompts = requests(cases, tokenizer, model, answer_of(started, own, tokenizer, compared.max_tokens))
        check_lengths(prompts, compared.max_tokens, own.about.integer("context_length"), model)
        for spec in specs:
            started.start(start_of(spec, start))
        measured = run_peers(started, prompts, compared.max_tokens, chosen.rounds, own)
    prompts = prompts[: measured.num_answers // chosen.rounds]
    about = f"{len(prompts)} prompts of up to {compared.max_tokens} tokens, {count} threads, rounds: {chosen.rounds}"
    facts = {
        "model": without_folders(model),
        "prompts": len(prompts),
        "max_tokens": compared.max_tokens,
        "threads": count,
    }
    target = TargetFacts(without_folders(model), own.precision, random_weights=model.startswith(RANDOM))
    has_avx512 = "avx512f" in features()
    print_report(peers_report(measured, own.name, about, target, facts, has_avx512), watch, json)
    if measured.interrupted:
        say(f"interrupted: the tables hold the first {len(prompts)} prompts")
        raise typer.Exit(INTERRUPTED)
