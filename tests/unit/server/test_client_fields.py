"""What agents send that no local model can honour: it is taken, and the response and the log name it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun.server.logs import LOGGER, TextFormatter
from serving import until
from written_answers import answered, written

HEADER = "x-forerun-ignored"
CALL = '```json\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n```'
COMMAND = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
FUNCTION = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs it.",
    "strict": False,
    "parameters": COMMAND,
}
SPAWN = {**FUNCTION, "name": "spawn_agent", "defer_loading": True}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX: dict[str, Any] = {
    # as its ResponsesApiRequest and ToolSpec are written (codex-rs/codex-api/src/common.rs, codex-rs/tools/src)
    "model": "",
    "instructions": "You are a coding agent.",
    "input": [message("developer", "<permissions>"), message("user", "<environment_context>"), message("user", "ls")],
    "tools": [
        FUNCTION,
        {"type": "namespace", "name": "multi_agent", "description": "Tools in the namespace.", "tools": [SPAWN]},
        {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": COMMAND},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": PATCH},
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": None,
    "prompt_cache_key": "01997d5e",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0f6b", "session_id": "01997d5e", "x-codex-turn-metadata": "{}"},
}
CODEX_IGNORED = (
    "text.verbosity, reasoning.summary, include, tools.namespace, tools.tool_search, tools.custom, tools.web_search, "
    "tools.image_generation, reasoning.effort"
)
CLAUDE: dict[str, Any] = {
    "model": "",
    "max_tokens": 99,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "ls"}]}],
    "tools": [
        {"name": "exec_command", "description": "Runs it.", "input_schema": COMMAND, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ],
    "metadata": {"user_id": "user"},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
CLAUDE_IGNORED = "context_management, thinking.display, tools.web_search, tools.text_editor, output_config.effort"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with written("hermes", CALL) as made:
        yield made


def test_codex(client: httpx.Client) -> None:
    response = client.post("/v1/responses", json={**CODEX, "temperature": 0})
    assert response.status_code == 200 and response.headers[HEADER] == CODEX_IGNORED
    last = json.loads(response.text.rstrip().rpartition("data: ")[2])
    assert last["type"] == "response.completed" and last["response"]["tools"] == CODEX["tools"]
    (call,) = last["response"]["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "exec_command",
        {"cmd": "ls"},
    )
    assert response.text.count("response.output_text.delta") == 0  # nothing of the call was sent as text
    done = {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "a"}]}
    again = {**CODEX, "input": [*CODEX["input"], {**call, "namespace": None}, done], "stream": False}
    assert client.post("/v1/responses", json=again).json()["status"] in ("completed", "incomplete")


def test_claude_code(client: httpx.Client) -> None:
    response = client.post("/v1/messages", json={**CLAUDE, "temperature": 0})
    assert response.status_code == 200 and response.headers[HEADER] == CLAUDE_IGNORED
    assert '"name":"exec_command"' in response.text and '"stop_reason":"tool_use"' in response.text
    counted = client.post("/v1/messages/count_tokens", json={**CLAUDE, "stream": None})
    plain = client.post("/v1/messages/count_tokens", json={**CLAUDE, "stream": None, "tools": CLAUDE["tools"][:1]})
    assert counted.json() == plain.json() and counted.status_code == 200


def test_the_model_does_not_see_tools_that_are_left_out(client: httpx.Client) -> None:
    """Whatever is ignored: the answer is that of a request without it."""
    chat = {"type": "function", "function": {key: FUNCTION[key] for key in ("name", "parameters")}}
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "ls"}], "tools": [chat], "temperature": 0}
    plain = answered(client, **talk)
    more = {"verbosity": "high", "reasoning_effort": "high", "client_metadata": {}, "context_management": []}
    others = [chat, {"type": "custom", "custom": {"name": "patch"}}, {"type": "web_search_preview_2025_03_11"}]
    response = client.post("/v1/chat/completions", json={**talk, **more, "tools": others})
    assert response.json()["usage"] == plain["usage"] | {
        "prompt_tokens_details": response.json()["usage"]["prompt_tokens_details"]
    }
    assert response.json()["choices"][0]["message"].keys() == plain["choices"][0]["message"].keys()
    assert response.headers[HEADER] == "verbosity, context_management, tools.custom, tools.web_search, reasoning_effort"
    assert HEADER not in client.post("/v1/chat/completions", json=talk).headers
    only = client.post("/v1/chat/completions", json={**talk, "tools": others[1:]})
    assert only.json()["choices"][0]["message"]["content"] == CALL


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a kind of tool": ({"tools": [{"type": "telepathy"}]}, "tools", "of the type 'telepathy', which is not known"),
    "a tool that must be run": ({"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search, but the server"),
    "a namespace": ({"tool_choice": {"type": "namespace", "name": "a"}}, "tool_choice", "called by two names"),
    "an include": ({"include": ["reasoning.text"]}, "include", "'reasoning.text', but must be 'message."),
    "a truncation": ({"truncation": "middle"}, "truncation", "'middle' would be ignored, since nothing is cut"),
    "a background": ({"background": True}, "background", "other than False: True would be"),
    "a part of a part": ({"reasoning": {"depth": 3}}, "reasoning", "reasoning.depth is not supported: 3 would be"),
    "an unknown field": ({"conversation": "c"}, "conversation", "not supported: a string would be ignored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(client: httpx.Client, name: str) -> None:
    fields, param, words = REFUSED[name]
    response = client.post("/v1/responses", json={**CODEX, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert words in error["message"] and error["message"].endswith(("out.", "it."))


def test_the_log_names_what_was_ignored_and_the_field_of_each_refusal(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[dict[str, Any]] = [
        {"json": CODEX},
        *({"json": {**CODEX, **fields}} for fields, _, _ in REFUSED.values()),
    ]
    requests.append({"content": b"{", "headers": {"content-type": "application/json"}})
    found: dict[str, Any] = {}
    with caplog.at_level(logging.INFO, LOGGER):
        for number, request in enumerate(requests):
            headers = {**request.pop("headers", {}), "x-request-id": f"asked-{number}"}
            client.post("/v1/responses", headers=headers, **request)

        def is_told() -> bool:  # a line is written after the response
            told: list[Any] = [each.msg for each in caplog.records]
            found.update({each["request_id"]: each for each in told if str(each["request_id"]).startswith("asked-")})
            return len(found) == len(requests)

        until(is_told)
    first, *refused = (found[f"asked-{number}"] for number in range(len(requests)))
    assert first["ignored"] == CODEX_IGNORED.split(", ")
    record = logging.LogRecord(LOGGER, logging.INFO, __file__, 1, first, (), None)
    assert "without effect text.verbosity reasoning.summary" in TextFormatter().format(record)
    assert [each["param"] for each in refused] == [param for _, param, _ in REFUSED.values()] + ["body"]
