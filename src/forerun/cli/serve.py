"""`forerun serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import open_llm
from forerun.cli.memory_line import memory_told, note
from forerun.cli.options import LLMOptions
from forerun.cli.served_drafters import served_drafters
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


@with_flags
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The target model: 'smollm2' once it is fetched, 'bundled', a folder, a GGUF file, or a hub id.",
            show_default="smollm2 if it is fetched, else bundled",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help=f"{options.DRAFTER_HELP} {_REPEATABLE}", metavar="DRAFTER", show_default="auto"),
    ] = None,
    draft_model: DraftModelName = None,
    speculative_config: SpeculativeConfig = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model.", metavar="NAME", show_default="that of MODEL")
    ] = None,
    server: Annotated[ServerOptions, Flags(panel="Server")],
    settings: Annotated[LLMOptions, Flags()],
    engine: Annotated[EngineConfig, Flags("max_batch", "prefill_chunk")],
) -> None:
    """Serve a model by OpenAI's API: chats, completions, streams; with speculation where it pays."""
    try:
        from forerun.server.run import bound_socket, serve as run
        from forerun.server.service import Service
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("forerun"):
            raise
        raise ConfigError(f"The server needs {error.name}, which is not installed: {INSTALL}") from None
    from forerun.server.logs import log_as_json

    model = chosen_model(model, "MODEL")
    drafters = served_drafters(drafter or [], draft_model, speculative_config)
    if server.is_open:
        note(f"{server.host} lets other machines in, and there is no --api-key: whoever reaches it may use it")
    if server.journal is not None:
        check_place(server.journal)
    sizes = {"max_batch": engine.max_batch, "prefill_chunk": engine.prefill_chunk}
    with bound_socket(server) as listening:
        note(f"loading {model}")
        with memory_told(note):
            llm = open_llm(model, drafters, chat=False, **asdict(settings) | sizes)
        log_as_json()
        run(Service(llm, served_model_name or model, server), listening)
