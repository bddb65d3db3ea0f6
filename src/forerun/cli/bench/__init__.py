"""`forerun bench`: measure the figures of docs/benchmarks.md on this machine."""

from __future__ import annotations

import typer

from forerun.cli.bench import acceptance, agent, compare, forward, generate, gpu, peers, quality, replay, report, serve

app = typer.Typer(help="Measure forerun on this machine, beside Hugging Face Transformers.", no_args_is_help=True)
_COMMANDS = {
    "forward": forward.forward,
    "generate": generate.bench_generate,
    "peers": peers.peers,
    "replay": replay.replay,
    "serve": serve.bench_serve,
    "acceptance": acceptance.acceptance,
    "agent": agent.agent,
    "quality": quality.quality,
    "report": report.report,
    "compare": compare.compare,
    "gpu": gpu.gpu,
}
for name, command in _COMMANDS.items():
    app.command(name)(command)
