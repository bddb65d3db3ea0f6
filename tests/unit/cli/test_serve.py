"""`forerun serve`: its drafters, its flags and its file, and what is said where it cannot run."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from config_keys import keys_in_file
from forerun.cli import serve as command
from forerun.cli.main import app
from forerun.cli.serve import served_drafters
from forerun.errors import ConfigError, DrafterError
from forerun.server import run as server_run

RUNNER = CliRunner()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["auto", "prediction"]),
        ({"drafters": ["recycling", "prediction"]}, ["recycling", "prediction"]),
        ({"drafters": ["none"]}, "none"),
        ({"draft_model": "owner/draft"}, ["hybrid:sources=suffix+owner/draft", "prediction"]),
        (
            {"draft_model": "d", "draft_vocab": 0},
            ['hybrid:sources=suffix+"draft-model:model=d,draft_vocab=0"', "prediction"],
        ),
        ({"drafters": ["suffix"], "draft_model": "/a+b"}, ['hybrid:sources=suffix+"/a+b"', "prediction"]),
        (
            {"drafters": ["draft-model", "suffix"], "draft_model": "owner/draft"},
            ["draft-model:model=owner/draft", "suffix", "prediction"],
        ),
        (
            {"drafters": ["suffix", "recycling", "draft-model"], "draft_model": "owner/draft"},
            ["suffix", "recycling", "draft-model:model=owner/draft", "prediction"],
        ),
        (
            {"drafters": ["recycling", "suffix", "auto"], "draft_model": "d"},
            ["recycling", "suffix", "hybrid:sources=suffix+d", "prediction"],
        ),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'},
            ["prompt-lookup:min_ngram=3,max_ngram=3,num_draft_tokens=5", "prediction"],
        ),
        ({"speculative_config": '{"model": "owner/draft"}'}, ["draft-model:model=owner/draft", "prediction"]),
        (
            {"speculative_config": '{"method": "eagle3", "model": "head", "num_speculative_tokens": 2}'},
            ["eagle:model=head,num_draft_tokens=2", "prediction"],
        ),
    ],
    ids=str,
)
def test_drafters(given: dict[str, Any], expected: list[str] | str) -> None:
    arguments = {"drafters": [], "draft_model": None, "speculative_config": None}
    assert served_drafters(**(arguments | given)) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drafters": ["suffix"], "speculative_config": "{}"}, "--drafter and --speculative-config"),
        ({"draft_model": "x", "speculative_config": "{}"}, "--draft-model and --speculative-config"),
        ({"drafters": ["none", "suffix"]}, "'none', and others"),
        ({"draft_vocab": 5000}, "--draft-vocab is 5000, but there is no --draft-model"),
        ({"drafters": ["recycling", "module:Class"], "draft_model": "d"}, "takes no other draft model, but 'd'"),
        ({"draft_model": ""}, "--draft-model is ''"),
        ({"draft_model": "none"}, "--draft-model is 'none'.*leave it out"),
        ({"drafters": ["cross-vocab"], "draft_model": "d", "draft_vocab": 0}, "--draft-vocab is 0, but cross-vocab"),
        ({"speculative_config": "{"}, "not JSON"),
        ({"speculative_config": "{}"}, "one of ngram"),
        ({"speculative_config": '{"method": "custom_class", "model": "os.System"}'}, "one of"),
        ({"speculative_config": '{"method": "draft_model"}'}, "model is missing"),
        ({"speculative_config": '{"method": "ngram", "quantization": "fp8"}'}, "quantization is not supported"),
        ({"speculative_config": '{"method": "suffix", "model": "x"}'}, "model is not supported"),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": -1}'}, "whole number"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"drafters": [], "draft_model": None, "speculative_config": None}
    with pytest.raises((ConfigError, DrafterError), match=said):
        served_drafters(**(arguments | given))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been loaded and served."""
    seen: list[dict[str, Any]] = []

    def open_llm(model: str, drafter: Any, **settings: Any) -> Any:
        seen.append({"model": model, "drafter": drafter, **settings})
        return object()

    def serve(service: Any, listening: socket.socket) -> None:
        seen[-1].update(service)

    monkeypatch.setattr(command, "open_llm", open_llm)
    monkeypatch.setattr(server_run, "run_server", serve)
    monkeypatch.setattr("forerun.server.service.Service", lambda llm, name, options: {"name": name, "options": options})
    monkeypatch.setattr("forerun.server.logs.start_log", lambda _: None)
    return seen


def test_a_model_of_a_path_is_called_by_its_file(started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    done = RUNNER.invoke(app, ["serve", str(tmp_path / "small.gguf"), "--port", "0"])
    assert done.exit_code == 0, done.output
    assert started[0]["model"] == str(tmp_path / "small.gguf") and started[0]["name"] == "small"


def test_flags_and_file(started: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "forerun.toml"
    file.write_text(
        '[serve]\nmodel = "bundled"\nport = 0\napi_key = ["a", "b"]\nmax_queue = 7\ndrafter = ["suffix", "recycling"]\n'
        'max_body = 2.5\nmax_batch = 3\nlog_prompts = true\nnum_draft_tokens = "4"\ncors_origin = "https://a.example"\n'
    )
    done = RUNNER.invoke(app, ["--config", str(file), "serve", "--served-model-name", "it"])
    assert done.exit_code == 0, done.output
    (seen,) = started
    assert seen["model"] == "bundled" and seen["drafter"] == ["suffix", "recycling", "prediction"]
    assert seen["max_batch"] == 3 and seen["num_draft_tokens"] == 4 and seen["name"] == "it"
    made = seen["options"]
    assert made.api_key == ("a", "b") and made.max_queue == 7 and made.max_body == 2.5 and made.log_prompts
    assert made.cors_origin == ("https://a.example",)


def test_an_open_server_is_told_of(started: list[Any]) -> None:
    done = RUNNER.invoke(app, ["serve", "bundled", "--port", "0", "--host", "0.0.0.0"])
    assert done.exit_code == 0 and "no --api-key" in done.output
    done = RUNNER.invoke(app, ["serve", "bundled", "--port", "0"])
    assert done.exit_code == 0 and "no --api-key" not in done.output


def test_ollamas_port(started: list[Any]) -> None:
    for more in ([], ["--port", "11434"]):
        done = RUNNER.invoke(app, ["serve", "bundled", "--ollama", *more])
        assert done.exit_code == 0, done.output
        assert started.pop()["options"].port == 11434
    done = RUNNER.invoke(app, ["serve", "bundled", "--ollama", "--port", "9000"])
    assert done.exit_code == 2 and "--ollama takes port 11434, but --port is 9000" in done.output


def test_a_port_that_is_taken(started: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = RUNNER.invoke(app, ["serve", "bundled", "--port", str(other.getsockname()[1])])
    assert done.exit_code == 2 and "cannot be listened on" in done.output and not started


BAD_TEMPLATES = {
    "is no JSON": ("{", "it is not JSON"),
    "has no fields": ("{}", "'fields'"),
    "has a pattern that is none": ('{"fields": {"thinking": {"open_pattern": "("}}}', "missing )"),
    "has tags of no pattern": ('{"fields": {"tool_calls": {"open": "a", "content": "xml-inline"}}}', "'tag_pattern'"),
    "is not there": (None, "No such file"),
}


@pytest.mark.parametrize("flags", [[], ["--ray"]])
@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_a_response_template_that_is_none(started: list[Any], name: str, flags: list[str], tmp_path: Path) -> None:
    """It is refused before anything is loaded."""
    (content, said), file = BAD_TEMPLATES[name], tmp_path / "template.json"
    if content is not None:
        file.write_text(content)
    done = RUNNER.invoke(app, ["serve", "bundled", "--port", "0", "--response-template", str(file), *flags])
    output = "".join(done.output.split())  # wherever its lines are broken
    assert done.exit_code == 2 and not started
    for part in (str(file), said, "Write it as Transformers' response templates are written."):
        assert "".join(part.split()) in output, done.output


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith("forerun.server."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = RUNNER.invoke(app, ["serve", "bundled"])
    assert done.exit_code == 2 and "pip install 'forerun[server]'" in done.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "3"], "The option replicas is for --ray"),
        (["--ray", "--send-timeout", "3"], "The key send_timeout is for a server without --ray"),
        (["--ray", "--routing", "x"], "must be one of prefix"),
    ],
)
def test_flags_of_ray_that_cannot_be_had(flags: list[str], said: str, tmp_path: Path) -> None:
    done = RUNNER.invoke(app, keys_in_file(["serve", "bundled", *flags], tmp_path / "keys.toml"))
    assert done.exit_code == 2 and said in " ".join(done.output.split())


@pytest.mark.parametrize("command", [["serve", "bundled"], ["batch", "in.jsonl", "out.jsonl"]])
@pytest.mark.parametrize("version", ["", "1.0.0"])
def test_without_ray_or_with_another_version(
    command: list[str], version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    Path("in.jsonl").write_text(json.dumps(line))
    monkeypatch.setattr("forerun.integrations.versions._installed", lambda tried: version or None)
    monkeypatch.setitem(sys.modules, "ray", None)
    rest = ["--model", "bundled"] if command[0] == "batch" else ["--port", "0"]
    arguments = keys_in_file([*command, "--ray", "--replica-threads", "1", *rest], tmp_path / "keys.toml")
    monkeypatch.setattr("forerun.server.logs.start_log", lambda _: None)  # not into a stream that ends here
    done = RUNNER.invoke(app, arguments)
    said = " ".join(done.output.split())
    assert "versions tried: 2.60. pip install 'forerun[ray]'" in said
    assert (
        ("is not installed" in said and done.exit_code == 2) if not version else "Ray 1.0.0 has not been tried" in said
    )


def test_a_file_may_name_no_cluster(tmp_path: Path) -> None:
    file = tmp_path / "forerun.toml"
    file.write_text('[serve]\nray = true\nray_address = "10.0.0.1:6379"\n')
    done = RUNNER.invoke(app, ["--config", str(file), "serve", "bundled"])
    assert done.exit_code == 2 and "a cluster may run any code here" in " ".join(done.output.split())


def test_a_chat_template_of_a_file(started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "it.jinja").write_text("{{ messages }}")
    done = RUNNER.invoke(app, ["serve", "bundled", "--port", "0", "--chat-template", str(tmp_path / "it.jinja")])
    assert done.exit_code == 0 and started[-1]["chat_template"] == "{{ messages }}"
