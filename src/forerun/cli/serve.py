"""`forerun serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import open_llm
from forerun.cli.memory_line import memory_told, note
from forerun.cli.options import LLMOptions
from forerun.cli.serve_ray import serve_replicas
from forerun.cli.served_drafters import served_drafters
from forerun.cluster.options import RayOptions
from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.server.options import ServerOptions
from forerun.traffic.recorder import check_place

_REPEATABLE = "Repeatable: requests choose by name, the first is the default."
INSTALL = "pip install 'forerun[server]'"

DraftModelName = Annotated[
    str | None, typer.Option(help="Folder or id of a draft model: --drafter draft-model:model=...", metavar="MODEL")
]
SpeculativeConfig = Annotated[
    str | None, typer.Option(help="The drafter as vLLM writes it, a JSON object.", metavar="JSON")
]


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="The target model: 'smollm2' once it is fetched, 'bundled', a folder, a GGUF file, or a hub id.",
        show_default="smollm2 if it is fetched, else bundled",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(help=f"{options.DRAFTER_HELP} {_REPEATABLE}", metavar="DRAFTER", show_default="auto"),
]
ServedName = Annotated[
    str | None, typer.Option(help="What requests call the model.", metavar="NAME", show_default="that of MODEL")
]


@with_flags
def serve(
    *,
    model: Model = None,
    drafter: Drafters = None,
    draft_model: DraftModelName = None,
    speculative_config: SpeculativeConfig = None,
    served_model_name: ServedName = None,
    server: Annotated[ServerOptions, Flags(panel="Server")],
    ray: Annotated[RayOptions, Flags(panel="Ray")],
    settings: Annotated[LLMOptions, Flags()],
    engine: Annotated[EngineConfig, Flags("max_batch", "prefill_chunk")],
) -> None:
    """Serve a model by OpenAI's API: chats, completions, streams; with speculation where it pays."""
    check_extra()
    model = chosen_model(model, "MODEL")
    drafters = served_drafters(drafter or [], draft_model, speculative_config)
    if server.is_open:
        note(f"{server.host} lets other machines in, and there is no --api-key: whoever reaches it may use it")
    name = served_model_name or model
    llm = asdict(settings) | {"max_batch": engine.max_batch, "prefill_chunk": engine.prefill_chunk}
    if ray.ray:
        serve_replicas(model, name, drafters, llm, server, ray)
    else:
        _serve_here(model, name, drafters, llm, server)


def check_extra() -> None:
    """Raise ConfigError where what the server needs is not installed."""
    try:
        import forerun.server.run
        import forerun.server.service  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("forerun"):
            raise
        raise ConfigError(f"The server needs {error.name}, which is not installed: {INSTALL}") from None


def _serve_here(model: str, name: str, drafters: str | list[str], llm: dict[str, Any], server: ServerOptions) -> None:
    """In this process."""
    from forerun.server.logs import log_as_json
    from forerun.server.run import bound_socket, serve as run
    from forerun.server.service import Service

    if server.journal is not None:
        check_place(server.journal)
    with bound_socket(server) as listening:
        note(f"loading {model}")
        with memory_told(note):
            opened = open_llm(model, drafters, chat=False, **llm)
        log_as_json()
        run(Service(opened, name, server), listening)
