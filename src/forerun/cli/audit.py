"""`forerun audit`: a certificate of losslessness for a model with a drafter, or for a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.bench.shared import check_json
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import WORKLOAD_FILE, LLMOptions, chosen_model
from forerun.cli.output import TimedProgress, log_memory_plan, note, print_json
from forerun.config import AUTO, NO_DRAFTER
from forerun.errors import ConfigError, DrafterError
from forerun.kernels.provenance import Watch
from forerun.lab.audit.pace import Pace
from forerun.lab.audit.settings import NEEDS_DRAFTER, AuditOptions, quick as quick_settings
from forerun.utils.workloads import load_workload

if TYPE_CHECKING:
    from forerun.lab.audit.certificate import Certificate

FAILED, INCONCLUSIVE = 1, 3
"""Exit codes; errors exit with 2. The loss of a lossy rule is measured, with exit code 0."""
_MOST_URLS = 2

Model = Annotated[
    str | None,
    options.model_argument(
        f"The target model: {options.A_MODEL} With --url: what the server calls it.",
        "smollm2 if it is fetched, else bundled; with --url the server's first",
    ),
]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help='Audit a server that speaks OpenAI\'s API instead: one with the switch "speculative": false in its '
        "bodies, or two addresses, the first with speculation, the second without.",
        metavar="URL",
    ),
]
ApiKey = Annotated[str | None, typer.Option(help="Sent to the server as a bearer token.", metavar="KEY")]
Prompts = Annotated[
    str | None,
    typer.Option(
        help=f"A bundled workload, {WORKLOAD_FILE}",
        metavar="WORKLOAD",
        show_default="questions for a model with a chat template, else code",
    ),
]
ResultsFile = Annotated[
    Path | None,
    typer.Option("--results", help="Write the figures for `forerun bench report`; not with --url.", metavar="FILE"),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="The same grid at small sizes: half a minute for the bundled pair, three minutes at most."
    ),
]


@with_flags
def audit(
    *,
    model: Model = None,
    drafter: options.DrafterName = None,
    draft_model: options.DraftModelName = None,
    url: Urls = None,
    api_key: ApiKey = None,
    prompts: Prompts = None,
    quick: Quick = False,
    results: ResultsFile = None,
    settings: Annotated[AuditOptions, Flags("samples", "requests", "num_prompts", "max_tokens", typed=())],
    llm: Annotated[
        LLMOptions,
        Flags(
            *("acceptance", "dtype", "device", "quantize", "kv_cache_dtype", "adapter"),
            typed=("acceptance", "dtype", "device", "quantize"),
        ),
    ],
    json: options.Json = False,
) -> None:
    """Check whether the text is really the same: bits, rules and real requests against exact probabilities.

    Exit code 0: no loss was found, or that of a lossy rule is measured; 1: a layer failed; 3: inconclusive.
    """
    if results is not None and url:
        raise ConfigError("--results keeps the figures of a model here, and --url names a server. Leave one out.")
    check_json(results, "--results")
    watch = Watch.begin()
    if quick:
        settings = quick_settings(settings)
    seconds = 60 * settings.minutes or inf
    with TimedProgress("audit", seconds) as progress:
        pace = Pace(seconds, progress)
        if url:
            certificate = _of_server(url, api_key, model, prompts, settings, pace)
        else:
            drafter = options.named_drafter(drafter, draft_model)
            certificate = _of_model(chosen_model(model, "MODEL"), drafter, prompts, settings, llm, pace)
    if json:
        print_json(certificate.as_object())
    else:
        typer.echo(certificate.markdown())
    if results is not None:
        from forerun.lab.audit.certificate import audit_results
        from forerun.lab.results.files import command_line, save_results

        save_results(audit_results(certificate, command_line(sys.argv[1:]), watch.environment()), results)
    code = {"fail": FAILED, "inconclusive": INCONCLUSIVE}.get(certificate.verdict, 0)
    if code:
        raise typer.Exit(code)


def _of_model(
    model: str, drafter: str | None, prompts: str | None, settings: AuditOptions, llm: LLMOptions, pace: Pace
) -> Certificate:
    """Audit a model with a drafter, in this process."""
    from forerun.engine import LLM
    from forerun.kernels.provenance import machine_facts
    from forerun.lab.audit.engine_layer import Audited
    from forerun.lab.audit.local import run_audit
    from forerun.models import number_format

    if drafter == NO_DRAFTER:
        raise DrafterError(NEEDS_DRAFTER)
    cases = None if prompts is None else load_workload(prompts)
    options.set_threads(None)
    note(f"loading {model}")
    with log_memory_plan(note):
        opened = LLM(model, drafter or AUTO, seed=settings.seed, **asdict(llm))
    if cases is None:
        cases = load_workload("questions" if getattr(opened.tokenizer, "chat_template", None) else "code")
    audited = Audited(opened.target, opened.drafter, opened.tokenizer, llm.acceptance, llm.prefix_reuse)
    exactness = opened.target.exactness
    subject = {
        "model": model,
        "drafter": opened.drafter_name,
        "number_format": number_format(opened.target),
        "adapter": llm.adapter,
        "acceptance": llm.acceptance,
        "exact": "yes" if exactness.exact else f"no: {exactness.reason}",
        "seed": settings.seed,
    }
    certificate = run_audit(
        audited,
        [opened.encode(case.opening) for case in cases[:64]],
        settings,
        acceptance=llm.acceptance,
        subject=subject,
        pace=pace,
    )
    certificate.environment = machine_facts()
    return certificate


def _of_server(
    urls: Sequence[str],
    api_key: str | None,
    model: str | None,
    prompts: str | None,
    settings: AuditOptions,
    pace: Pace,
) -> Certificate:
    """Audit a server against itself without speculation, or two servers."""
    from forerun.kernels.provenance import machine_facts
    from forerun.lab.audit.remote import SWITCH, AuditedServer, remote_audit

    if len(urls) > _MOST_URLS:
        raise ConfigError(f"There are {len(urls)} of --url, but at most {_MOST_URLS} can be compared. Leave some out.")
    cases = load_workload(prompts or "code")
    texts = [case.prompt for case in cases if case.prompt]
    if not texts:
        raise ConfigError(f"{prompts} holds no raw text, which the server is to continue. Give prompts as text.")
    speculative = AuditedServer(urls[0], api_key, model)
    plain = AuditedServer(urls[-1], api_key, model, SWITCH if len(urls) == 1 else None)
    try:
        subject = {"speculative": speculative.url, "plain": f"{plain.url} {plain.extra or ''}".rstrip()}
        certificate = remote_audit(
            speculative,
            plain,
            texts,
            settings,
            subject={"model": speculative.model, **subject},
            pace=pace,
        )
    finally:
        speculative.close()
        plain.close()
    certificate.environment = machine_facts()
    return certificate
