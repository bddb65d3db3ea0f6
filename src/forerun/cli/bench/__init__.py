"""`forerun bench`: measure the figures of docs/benchmarks.md on this machine."""

from __future__ import annotations

import typer

from forerun.cli.bench import acceptance, compare, forward, generate, gpu, peers, quality, replay, report, serve

app = typer.Typer(help="Measure forerun on this machine, beside Hugging Face Transformers.", no_args_is_help=True)
for command in (
    forward.forward,
    generate.generate,
    peers.peers,
    replay.replay,
    serve.serve,
    acceptance.acceptance,
    quality.quality,
    report.report,
    compare.compare,
    gpu.gpu,
):
    app.command()(command)
