"""`forerun bench`: the figures of docs/benchmarks.md, measured on this machine. One file per command."""

from __future__ import annotations

import typer

from forerun.cli.bench import acceptance, compare, forward, generate, gpu, peers, quality, replay, report, serve

app = typer.Typer(help="Measure forerun on this machine, beside Hugging Face Transformers.", no_args_is_help=True)
app.command()(forward.forward)
app.command()(generate.generate)
app.command()(peers.peers)
app.command()(replay.replay)
app.command()(serve.serve)
app.command()(acceptance.acceptance)
app.command()(quality.quality)
app.command()(report.report)
app.command()(compare.compare)
app.command()(gpu.gpu)
