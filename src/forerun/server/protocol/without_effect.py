"""What clients send that no local model can honour: fields that are taken without effect, and tools that are left out.

What would change the answer is not here: it is refused by its name. The response names what was ignored in the header
`x-forerun-ignored`, and so does the log of requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from forerun.errors import RequestBodyError

IGNORED_HEADER = "x-forerun-ignored"


class Ignored(NamedTuple):
    """Why a field has no effect.

    Attributes:
        values: that are taken; None: all.
        is_told: the response names the field. Labels, and values that ask for nothing, are not told.
    """

    reason: str
    values: tuple[Any, ...] | None = None
    is_told: bool = True


_LABEL = Ignored("it labels the request, and nobody reads it", is_told=False)
_CACHE = Ignored("beginnings of prompts are kept whatever a request says", is_told=False)
_HINT = Ignored("no chat template reads it")
_SUMMARY = Ignored("thinking is given as it is, not as a summary")
_HOSTED = Ignored("it is of tools that the server would have to run")


def _nothing(*values: Any) -> Ignored:
    return Ignored("the server does not do it", values, is_told=False)


WITHOUT_EFFECT: Mapping[str, Ignored] = {
    # who asks, for what, and how it is booked
    **dict.fromkeys(
        ("user", "metadata", "client_metadata", "safety_identifier", "store", "betas", "diagnostics"), _LABEL
    ),
    **dict.fromkeys(("service_tier", "inference_geo", "speed"), Ignored("there is one way to compute answers")),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"), _CACHE),
    # hints
    **dict.fromkeys(("verbosity", "text.verbosity", "output_config.task_budget"), _HINT),
    **dict.fromkeys(("reasoning.summary", "reasoning.generate_summary", "thinking.display"), _SUMMARY),
    "reasoning.context": Ignored("all thinking that the client sends is in the prompt"),
    "include": Ignored(
        "answers have no such parts",
        (
            *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
            *("web_search_call.action.sources", "code_interpreter_call.outputs"),
            *("computer_call_output.output.image_url", "message.input_image.image_url"),
        ),
    ),
    # what is done with long conversations: a prompt that does not fit is refused
    "truncation": Ignored("nothing is cut", ("auto", "disabled"), is_told=False),
    "context_management": Ignored("nothing is cleared or summarized"),
    # tools
    "parallel_tool_calls": Ignored("a completion has no calls", is_told=False),
    **dict.fromkeys(("max_tool_calls", "web_search_options", "mcp_servers"), _HOSTED),
    # what is not done is not asked for
    "modalities": _nothing(["text"]),
    "tools": _nothing([]),
    "tool_choice": _nothing("none"),
    "functions": _nothing([]),
    "function_call": _nothing("none", "auto"),
    "spaces_between_special_tokens": _nothing(True),
    "use_beam_search": _nothing(False),
    "background": _nothing(False),
    "stream_options": _nothing({"include_obfuscation": False}, {}),
}
"""Fields of bodies that the server does not read, of all its APIs: those within others by their path."""

_RUN = "the server would have to run it"
_OWN = "its arguments are known to its provider's models alone"
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution"), _RUN),
    **dict.fromkeys(("image_generation", "mcp", "mcp_toolset", "tool_search", "programmatic_tool_calling"), _RUN),
    **dict.fromkeys(("tool_search_tool_regex", "tool_search_tool_bm25", "advisor"), _RUN),
    **dict.fromkeys(("computer", "computer_use", "bash", "text_editor", "memory"), _OWN),
    **dict.fromkeys(("local_shell", "shell", "apply_patch"), _OWN),
    "custom": "its input is free text, and no model's calls have that",
    "namespace": "its functions are called by two names, and no model's calls have two",
}
"""Kinds of tools that the model does not see, and why."""
_VERSION = re.compile(r"(?:_preview|_\d{4}_\d\d_\d\d|_\d{8})+\Z")


def kind_left_out(tool: Any) -> str | None:
    """Return the kind of LEFT_OUT of a tool, or of a choice of one; None for others. Kinds may have a version."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    name = _VERSION.sub("", kind) if isinstance(kind, str) else ""
    # Anthropic's functions are custom, too
    return name if name in LEFT_OUT and not (name == "custom" and "input_schema" in tool) else None


def take_tool(tool: Any, check: Callable[[Any], Any]) -> Any:
    """Return a tool as it is, since the order of its keys is that of the prompt: for `WrapValidator`.

    check: of functions.

    Raises:
        RequestBodyError: its kind is not known.
    """
    if kind_left_out(tool) is None:
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            raise RequestBodyError(
                f"tools has one of the type {ascii(kind)[:60]}, which is not known. Give functions, or leave it out.",
                "tools",
            )
        check(tool)
    return tool


def offered_tools(tools: Iterable[Any] | None) -> list[Any]:
    """Return the tools that the model sees."""
    return [tool for tool in tools or () if kind_left_out(tool) is None]


def ignored_tools(tools: Iterable[Any] | None) -> list[str]:
    """Return names of those that it does not see, as they stand in IGNORED_HEADER."""
    kinds = (kind_left_out(tool) for tool in tools or ())
    return [*dict.fromkeys(f"tools.{kind}" for kind in kinds if kind is not None)]


def check_choice(choice: Any) -> Any:
    """Return a tool_choice. Raises RequestBodyError if it names a tool that is left out."""
    if (kind := kind_left_out(choice)) is not None:
        raise RequestBodyError(
            f"tool_choice is {kind}, but {LEFT_OUT[kind]}. Name a function, or leave tool_choice out.", "tool_choice"
        )
    return choice
