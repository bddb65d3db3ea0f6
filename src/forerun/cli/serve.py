"""`forerun serve`: an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.flags import Flags, given, with_flags
from forerun.cli.generate import open_llm
from forerun.cli.options import LLMOptions, chosen_model
from forerun.cli.output import log_memory_plan, note, note_untried
from forerun.config import AUTO, DEFAULT_DRAFTER, NO_DRAFTER, AdaptOptions, EngineConfig
from forerun.drafters.parse_text import drafter_of_vllm
from forerun.drafters.registry import takes_draft_model
from forerun.errors import ConfigError
from forerun.integrations.ray.plan import RayOptions, ServePlan
from forerun.server.options import OLLAMA_PORT, ServerOptions
from forerun.server.traffic_records import check_journal_path
from forerun.utils.json_file import Fields
from forerun.utils.model_names import served_name

_CONFIG_FLAG = "--speculative-config"


def served_drafters(
    drafters: Sequence[str], draft_model: str | None, speculative_config: str | None, draft_vocab: int | None = None
) -> str | list[str]:
    """Return the texts of the drafters to load, the default one first; NO_DRAFTER for plain decoding.

    `prediction` is always among them, for requests that have one.

    Raises:
        ConfigError: two flags contradict each other, or one of them is invalid.
        DrafterError: no drafter takes the draft model.
    """
    if speculative_config is not None:
        flags = {"--drafter": drafters, "--draft-model": draft_model, "--draft-vocab": draft_vocab}
        if given := [flag for flag, value in flags.items() if value or value == 0]:
            raise ConfigError(f"{given[0]} and {_CONFIG_FLAG} both choose the drafter. Give one of them.")
        remedy = 'Give an object such as {"method": "ngram"}.'
        drafters = [drafter_of_vllm(Fields.parse(speculative_config, _CONFIG_FLAG, ConfigError, remedy=remedy))]
    else:
        drafters = [*drafters] or [AUTO]
        # Suffix matches become a hybrid with it only if no other takes it: requests may name them.
        takers = [number for number, text in enumerate(drafters) if draft_model is not None and takes_draft_model(text)]
        order = {AUTO: 1, DEFAULT_DRAFTER: 2}
        taker = min(takers or [0], key=lambda number: order.get(drafters[number].partition(":")[0], 0))
        named = options.named_drafter(drafters[taker], draft_model, draft_vocab)
        drafters = [named or text if number == taker else text for number, text in enumerate(drafters)]
    if NO_DRAFTER in drafters:
        if len(drafters) > 1:
            raise ConfigError(f"--drafter is {NO_DRAFTER!r}, and others too. Give it alone, or leave it out.")
        return NO_DRAFTER
    has_prediction = any(text.partition(":")[0] == "prediction" for text in drafters)
    return [*drafters] if has_prediction else [*drafters, "prediction"]


_REPEATABLE = "Repeatable: requests choose by name, the first is the default."
_LLM_TYPED = (
    *("acceptance", "cache_memory", "prefix_reuse", "prompt_cache", "prompt_cache_size", "max_model_len"),
    *("remember_size", "tensor_parallel_size"),
)
_SERVER_TYPED = (
    *("host", "port", "api_key", "metrics_key", "allowed_host", "trust_priority", "request_timeout", "journal"),
    *("response_template", "log_format"),
)
_FIXED = ("max_prompts", "body_timeout", "journal_size")
INSTALL = "pip install 'forerun[server]'"

SpeculativeConfig = Annotated[
    str | None, typer.Option(help="The drafter as vLLM writes it, a JSON object.", metavar="JSON")
]


Drafters = Annotated[
    list[str] | None,
    typer.Option(help=f"{options.DRAFTER_HELP} {_REPEATABLE}", metavar="DRAFTER", show_default="auto"),
]
ServedName = Annotated[
    str | None, typer.Option(help="What requests call the model.", metavar="NAME", show_default="that of MODEL")
]

Ollama = Annotated[bool, typer.Option("--ollama", help=f"Listen on port {OLLAMA_PORT}, where Ollama's clients look.")]


@with_flags
def serve(
    *,
    ctx: typer.Context,
    model: options.TargetArgument = None,
    drafter: Drafters = None,
    draft_model: options.DraftModelName = None,
    draft_vocab: options.DraftVocab = None,
    speculative_config: SpeculativeConfig = None,
    served_model_name: ServedName = None,
    ollama: Ollama = False,
    chat_template: options.ChatTemplate = None,
    server: Annotated[ServerOptions, Flags(leave_out=_FIXED, typed=_SERVER_TYPED, panel="Server")],
    ray: Annotated[RayOptions, Flags(leave_out=("ray_timeout",), typed=options.RAY_TYPED, panel="Ray")],
    settings: Annotated[LLMOptions, Flags(typed=(*_LLM_TYPED, *options.LLM_TYPED))],
    learning: Annotated[AdaptOptions, Flags(typed=("adapt", "adapt_folder"), panel="Learning")],
    engine: Annotated[EngineConfig, Flags("max_batch", "prefill_chunk", typed=("max_batch",))],
    threads: options.Threads = None,
) -> None:
    """Serve a model by the APIs of OpenAI, Anthropic and Ollama; with speculation where it pays."""
    check_extra()
    if ollama:
        if given(ctx, "port") and server.port != OLLAMA_PORT:
            raise ConfigError(f"--ollama takes port {OLLAMA_PORT}, but --port is {server.port}. Leave one of them out.")
        server = replace(server, port=OLLAMA_PORT)
    if server.response_template is not None:
        from forerun.chat.response_format import read_format

        read_format(server.response_template)  # before the model is loaded, here or on Ray
    model = chosen_model(model, "MODEL")
    drafters = served_drafters(drafter or [], draft_model, speculative_config, draft_vocab)
    if server.is_open:
        note(
            f"{server.host} lets other machines in, and there is no --api-key: whoever reaches it may use it. Name "
            "each address by which they call it with --allowed-host"
        )
    name = served_model_name or served_name(model)
    llm = asdict(settings) | {"max_batch": engine.max_batch, "prefill_chunk": engine.prefill_chunk}
    llm["chat_template"] = options.template_text(chat_template)
    if ray.ray:
        if learning.adapt:
            raise ConfigError(
                "--adapt is for a server in one process, but --ray starts several. Leave one of them out."
            )
        ray = replace(ray, replica_threads=ray.replica_threads or threads)
        _serve_on_ray(ServePlan.of(model, name, drafters, llm, server, ray), ray)
    else:
        options.set_threads(threads)
        _serve_here(model, name, drafters, llm | {"adapt": learning}, server)


def check_extra() -> None:
    """Raise ConfigError if a package that the server needs is not installed."""
    try:
        import forerun.server.run
        import forerun.server.service  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("forerun"):
            raise
        raise ConfigError(f"The server needs {error.name}, which is not installed: {INSTALL}") from None


def _serve_on_ray(plan: ServePlan, ray: RayOptions) -> None:
    """Serve by replicas on Ray. Raises ConfigError as `serve_on_ray`, and if Ray is not installed."""
    note_untried("Ray")
    from forerun.integrations.ray.run import serve_on_ray
    from forerun.server.logs import start_log
    from forerun.server.run import bound_socket

    with bound_socket(plan.server) as listening:  # a port in use is an error before anything is started
        server = replace(plan.server, port=listening.getsockname()[1])
    note(f"starting {ray.replicas} replicas of {plan.model}")
    start_log(server.log_format)
    serve_on_ray(plan, server, ray)


def _serve_here(model: str, name: str, drafters: str | list[str], llm: dict[str, Any], server: ServerOptions) -> None:
    """Serve in this process."""
    from forerun.server.logs import start_log
    from forerun.server.run import bound_socket, run_server, share_one_arena
    from forerun.server.service import Service

    share_one_arena()
    if server.journal is not None:
        check_journal_path(server.journal)
    with bound_socket(server) as listening:
        note(f"loading {model}")
        with log_memory_plan(note):
            opened = open_llm(model, drafters, chat=False, **llm)
        start_log(server.log_format)
        run_server(Service(opened, name, server), listening)
