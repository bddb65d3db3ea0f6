"""`forerun generate`, with a model that needs no weights."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import LLM, Grammar
from forerun.cli import generate
from forerun.cli.answers import stderr_lines
from forerun.cli.main import app
from forerun.errors import ForerunError, ModelLoadError

from .conftest import Invoke
from .fakes import WORDS, FakeLLM

TEXT = "".join(WORDS)
DEFAULT = (
    "forerun: no --model given, so it is bundled (no other is fetched; `forerun fetch smollm2` brings a chat model)"
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How the model was opened; "llm" is what open_llm returns."""
    seen: dict[str, Any] = {"llm": FakeLLM(drafts=True)}

    def open_llm(model: str, drafter: str | None, **settings: Any) -> FakeLLM:
        seen.update(model=model, drafter=drafter, **settings)
        llm: FakeLLM = seen["llm"]
        return llm

    monkeypatch.setattr(generate, "open_llm", open_llm)
    return seen


def test_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(invoke: Invoke, opened: dict[str, Any]) -> None:
    result = invoke("generate", "def f():")
    assert result.exit_code == 0
    assert result.stdout == TEXT
    default, loading, line = result.stderr.splitlines()
    assert default == DEFAULT
    assert loading == "forerun: loading bundled"
    assert re.match(r"forerun: 6 tokens in [\d.]+ s · the first after [\d.]+ s · then [\d.]+ tokens/s · ", line)
    assert "3.00 tokens per forward" in line
    assert "50 % of 8 draft tokens accepted" in line
    assert opened["llm"].closed


def test_threads(invoke: Invoke, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    monkeypatch.setattr("forerun.cli.options.performance_cores", lambda: 5)
    assert invoke("generate", "a").exit_code == 0 and not seen  # OMP_NUM_THREADS is set
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name)
    assert invoke("generate", "a").exit_code == 0 and seen.pop() == 5
    assert invoke("generate", "a", "--threads", "3").exit_code == 0 and seen == [3]
    for command in ("generate", "chat", "serve"):
        assert "--threads" in invoke(command, "--help").stdout


def test_the_prompt_comes_from_standard_input_unchanged(invoke: Invoke, opened: dict[str, Any]) -> None:
    for arguments in (("generate",), ("generate", "-")):
        assert invoke(*arguments, input="  def f():\n").exit_code == 0
    assert [prompt for prompt, _ in opened["llm"].requests] == ["  def f():\n"] * 2


def test_standard_input_that_is_not_text_is_refused(invoke: Invoke, opened: dict[str, Any]) -> None:
    result = invoke("generate", input=b"\xff\xfe\x00")
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_an_empty_standard_input_is_an_error(invoke: Invoke, opened: dict[str, Any]) -> None:
    for given in ("", " \n"):
        for arguments in (("generate",), ("generate", "-")):
            result = invoke(*arguments, input=given)
            assert result.exit_code == 2 and "Standard input is empty" in result.stderr
    assert "model" not in opened


@pytest.mark.parametrize(
    ("piped", "sent"), [(b"a file\n", "Shorten:\n\na file\n"), (b"", "Shorten:"), (None, "Shorten:")]
)
def test_what_is_piped_follows_the_prompt_of_its_flag(
    monkeypatch: pytest.MonkeyPatch, piped: bytes | None, sent: str
) -> None:
    end, start = os.pipe()
    with os.fdopen(start, "wb") as file:
        file.write(piped or b"")
    with os.fdopen(end) if piped is not None else Path(os.devnull).open() as standard_input:
        monkeypatch.setattr("sys.stdin", standard_input)
        assert generate.read_prompt(None, "Shorten:") == sent


def test_llama_cpps_flags(invoke: Invoke, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    result = invoke("generate", "-p", "hello", "-m", "it.gguf", "-c", "512", "-t", "3", "--temp", "0.5", "-n", "2")
    assert result.exit_code == 0, result.output
    prompt, params = opened["llm"].requests[0]
    assert (prompt, params.temperature, params.n) == ("hello", 0.5, 2)
    assert (opened["model"], opened["max_model_len"], threads) == ("it.gguf", 512, [3])
    twice = invoke("generate", "hello", "-p", "hello")
    assert twice.exit_code == 2 and "The prompt is given twice" in twice.stderr


@pytest.mark.parametrize("argument", ["a\udcff", "\ud83d"])
def test_an_argument_that_is_not_text_is_refused(invoke: Invoke, opened: dict[str, Any], argument: str) -> None:
    for arguments in ([argument], ["x", "--prediction", argument]):
        result = invoke("generate", *arguments)
        assert result.exit_code == 2
        assert "not UTF-8 text" in result.stderr
    assert "model" not in opened


def test_a_chat_comes_from_standard_input_as_json(invoke: Invoke, opened: dict[str, Any]) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    texts = ['["role"]', "[1, 2]", "[]", "[" * 100_000, '{"role": "user"}']
    for text, expected in [(json.dumps(chat), chat), *((text, [{"role": "user", "content": text}]) for text in texts)]:
        invoke("generate", "--chat", input=text)
        assert opened["llm"].requests[-1][0] == expected
    invoke("generate", input=json.dumps(chat))
    assert opened["llm"].requests[-1][0] == json.dumps(chat)


def test_a_chat_template_is_used_unless_the_prompt_is_raw(invoke: Invoke, opened: dict[str, Any]) -> None:
    opened["llm"].tokenizer.chat_template = "a template"
    for flags in ([], ["--raw"], ["--system", "be brief"]):
        assert invoke("generate", "hello", *flags).exit_code == 0
    user = {"role": "user", "content": "hello"}
    assert [prompt for prompt, _ in opened["llm"].requests] == [
        [user],
        "hello",
        [{"role": "system", "content": "be brief"}, user],
    ]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_is_the_models_own_unless_it_is_given(
    invoke: Invoke, opened: dict[str, Any], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened["llm"]
    llm.target.context_length, llm.target.name = 64, "fake"
    monkeypatch.setattr("forerun.cli.chat.command.open_llm", lambda *_, **__: llm)
    arguments = ("generate", "hi") if command == "generate" else ("chat", "some/model")
    plain = invoke(*arguments, input="hi\n")
    llm.target.recommended_sampling = {"temperature": 0.6, "top_k": 20}
    own = invoke(*arguments, input="hi\n")
    invoke(*arguments, "--temperature", "0.1", input="hi\n")
    assert [(each.temperature, each.top_k) for _, each in llm.requests] == [(0.7, 0), (0.6, 20), (0.1, 20)]
    assert own.stderr.count("sampling as the model's files recommend: temperature 0.6, top_k 20") == 1
    assert "recommend" not in plain.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [("--temperature 0", "at temperature 0"), ("--seed 3", "with a seed"), ("--temperature 1", None)],
)
def test_a_lossy_rule_that_changes_nothing_is_told(
    invoke: Invoke, opened: dict[str, Any], flags: str, reason: str | None
) -> None:
    stderr = invoke("generate", "x", "--acceptance", "typical", *flags.split()).stderr
    assert (f"--acceptance typical changes nothing {reason}" in stderr) == (reason is not None)
    assert "changes nothing" not in invoke("generate", "x", "--acceptance", "block", *flags.split()).stderr


def test_the_line_of_statistics_is_broken_between_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["forerun: 6 tokens in 0.01 s", "suffix", "finished: length"]
    assert stderr_lines(parts) == "forerun: 6 tokens in 0.01 s · suffix · finished: length"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert stderr_lines(parts) == "forerun: 6 tokens in 0.01 s · suffix\n  finished: length"
    monkeypatch.setenv("COLUMNS", "8")
    assert stderr_lines(parts).count("\n") == 2


def test_chat_makes_the_prompt_a_message(invoke: Invoke, opened: dict[str, Any]) -> None:
    invoke("generate", "--chat", "hello")
    assert opened["llm"].requests[0][0] == [{"role": "user", "content": "hello"}]


def test_the_system_message_comes_first(invoke: Invoke, opened: dict[str, Any]) -> None:
    system = {"role": "system", "content": "be brief"}
    user = {"role": "user", "content": "hello"}
    assert invoke("generate", "--chat", "--system", "be brief", "hello").exit_code == 0
    assert opened["llm"].requests[-1][0] == [system, user]
    invoke("generate", "--chat", "--system", "be brief", input=json.dumps([user]))
    assert opened["llm"].requests[-1][0] == [system, user]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--system", "x", "--raw", "hello"], "Leave out --raw"),
        (["--system", "x", "--chat", '[{"role": "system", "content": "y"}]'], "has a system message"),
        (["--system", "\udcff", "--chat", "hello"], "--system is not UTF-8"),
    ],
)
def test_a_system_message_without_its_place_is_refused(
    invoke: Invoke, opened: dict[str, Any], arguments: list[str], told: str
) -> None:
    result = invoke("generate", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "model" not in opened


@pytest.mark.parametrize(
    ("arguments", "drafter"),
    [
        ([], "auto"),
        (["--drafter", "none"], "none"),
        (["--drafter", "some/draft"], "some/draft"),
        (["--prediction", "y"], "prediction"),
        (["--model", "some/model", "--prediction", "y"], "prediction"),
        (["--drafter", "some/hybrid", "--prediction", "y"], "some/hybrid"),
        (["--drafter", "none", "--prediction", "y"], "none"),
        (["--draft-model", "some/draft"], "hybrid:sources=suffix+some/draft"),
        (["--draft-model", "some/draft", "--drafter", "draft-model"], "draft-model:model=some/draft"),
    ],
)
def test_the_drafter_is_chosen_for_the_target_unless_another_is_asked_for(
    invoke: Invoke, opened: dict[str, Any], arguments: list[str], drafter: str
) -> None:
    assert invoke("generate", "x", *arguments).exit_code == 0
    assert opened["drafter"] == drafter


@pytest.mark.parametrize(("flags", "expected"), [([], None), (["--num-draft-tokens", "7"], 7)])
def test_a_drafters_own_k_stands_unless_another_is_asked_for(
    invoke: Invoke, opened: dict[str, Any], flags: list[str], expected: int | None
) -> None:
    opened["llm"].num_draft_tokens = 24
    result = invoke("generate", "x", "--drafter", "draft-tree:num_draft_tokens=24", "--json", *flags)
    assert opened["num_draft_tokens"] == expected
    assert json.loads(result.stdout)["num_draft_tokens"] == 24


def test_every_sampling_option_arrives(invoke: Invoke, opened: dict[str, Any]) -> None:
    flags = (
        "--temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --logit-bias 3=-1.5 --logit-bias 4=2 --max-tokens 9 --min-tokens 2 --stop A --stop B "
        "--stop-token-id 7 --ignore-eos --seed 11 -n 2 --logprobs 3"
    )
    assert invoke("generate", "x", *flags.split()).exit_code == 0
    params = opened["llm"].requests[0][1]
    assert params.temperature == 0.7
    assert (params.top_k, params.top_p, params.min_p) == (5, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert params.logit_bias == {3: -1.5, 4: 2.0}
    assert (params.max_tokens, params.min_tokens, params.stop) == (9, 2, ("A", "B"))
    assert (params.stop_token_ids, params.ignore_eos, params.seed, params.n) == ((7,), True, 11, 2)
    assert params.logprobs == 3


def test_the_prediction_arrives_as_text_or_from_a_file(invoke: Invoke, opened: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "guess.txt"
    file.write_text("def f():\n    return 1\n", encoding="utf-8")
    for argument, text in (("a guess", "a guess"), (f"@{file}", "def f():\n    return 1\n"), (None, None)):
        assert invoke("generate", "x", *(["--prediction", argument] if argument else [])).exit_code == 0
        assert opened["llm"].requests[-1][1].prediction == text


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_prediction_that_cannot_be_read_is_refused(
    invoke: Invoke, opened: dict[str, Any], tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "guess.txt"
    if content is not None:
        file.write_bytes(content)
    result = invoke("generate", "x", "--prediction", f"@{file}")
    assert result.exit_code == 2
    assert ("UTF-8" if content else "cannot be read") in result.stderr
    assert str(file) in result.stderr
    assert not opened["llm"].requests


def test_json_is_one_object(invoke: Invoke, opened: dict[str, Any]) -> None:
    result = invoke("generate", "x", "--json", "--temperature", "1", "-n", "2")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert result.stderr == f"{DEFAULT}\n"
    assert report["exact"] is True
    assert [choice["text"] for choice in report["choices"]] == [TEXT, TEXT]
    assert report["choices"][0]["finish_reason"] == "length"
    stats = report["choices"][0]["stats"]
    assert stats["acceptance_rate"] == 0.5
    assert {"sources", "time_first_token", "tokens_per_second"} <= stats.keys()
    assert 0 < report["time_first_token"] < report["seconds"]
    assert report["decoding_tokens_per_second"] > 0


def test_choices_are_printed_one_after_the_other(invoke: Invoke, opened: dict[str, Any]) -> None:
    result = invoke("generate", "x", "-n", "2")
    assert result.stdout == f"--- choice 0\n{TEXT}\n--- choice 1\n{TEXT}\n"


def test_ctrl_c_prints_what_was_generated(invoke: Invoke, opened: dict[str, Any]) -> None:
    opened["llm"] = FakeLLM(drafts=True, fail_after=1)
    result = invoke("generate", "x")
    assert result.exit_code == 130
    assert result.stdout == "alpha beta gamma "
    assert "3 tokens in" in result.stderr
    assert "3.00 tokens per forward · 2 of the tokens were drafted" in result.stderr
    assert "interrupted" in result.stderr
    assert opened["llm"].closed


def test_ctrl_c_with_json_still_prints_one_object(invoke: Invoke, opened: dict[str, Any]) -> None:
    opened["llm"] = FakeLLM(fail_after=2)
    result = invoke("generate", "x", "--json")
    [choice] = json.loads(result.stdout)["choices"]
    assert result.exit_code == 130
    assert (choice["text"], choice["finish_reason"], choice["stats"]) == ("alpha beta ", "abort", None)


@pytest.mark.parametrize("error", [ModelLoadError("model folder x does not exist."), ForerunError("no")])
def test_our_errors_are_a_message_and_exit_code_2(invoke: Invoke, opened: dict[str, Any], error: Exception) -> None:
    opened["llm"] = FakeLLM(fail_after=0, error=error)
    result = invoke("generate", "x")
    assert result.exit_code == 2
    assert result.stderr == f"{DEFAULT}\nforerun: loading bundled\nforerun: {error}\n"
    assert "Traceback" not in result.output


def test_a_bug_is_not_dressed_up_as_a_user_error(invoke: Invoke, opened: dict[str, Any]) -> None:
    opened["llm"] = FakeLLM(fail_after=0, error=ZeroDivisionError("bug"))
    assert isinstance(invoke("generate", "x").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--temperature", "0", "-n", "2"],
        ["--min-tokens", "9", "--max-tokens", "3"],
        ["--logit-bias", "three=1"],
        ["--stop", ""],
        ["--no-such-flag"],
        ["--max-tokens", "many"],
    ],
)
def test_bad_options_exit_with_2_before_a_model_is_loaded(
    invoke: Invoke, opened: dict[str, Any], arguments: list[str]
) -> None:
    result = invoke("generate", "x", *arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert "model" not in opened


def test_precedence_is_flag_file_default(invoke: Invoke, opened: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "forerun.toml"
    file.write_text('[generate]\nmodel = "file"\nmax-tokens = 5\nstop = ["a", "b"]\njson = true\nseed = 3\n')
    result = invoke("--config", str(file), "generate", "x")
    params = opened["llm"].requests[-1][1]
    assert (opened["model"], params.max_tokens, params.seed, params.stop) == ("file", 5, 3, ("a", "b"))
    assert json.loads(result.stdout)["model"] == "file"

    invoke("--config", str(file), "generate", "x", "--seed", "5", env={"FORERUN_GENERATE_MODEL": "env"})
    params = opened["llm"].requests[-1][1]
    assert (opened["model"], params.max_tokens, params.seed, params.top_k) == ("file", 5, 5, 0)


def test_a_key_without_a_flag_is_refused_as_one(invoke: Invoke, opened: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--min-tokens", "3"])
    assert (result.exit_code, "model" in opened) == (2, False)
    assert result.stderr == (
        "forerun: --min-tokens is not a flag. Set the key min_tokens in the table [generate] of a TOML file, and pass "
        "the file with --config.\n"
    )
    assert "In a --config file alone" in invoke("generate", "--help").stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('max-tokens = "many"', "sets 'generate.max-tokens' to 'many': 'many' is not a whole number of 1 or more"),
        ("max-tokens = 5.5", "sets 'generate.max-tokens' to 5.5"),
        ("max_tokens = true", "sets 'generate.max_tokens' to True: true and false are for switches"),
        ("temperature = 999", "sets 'generate.temperature' to 999: 999 is not a number in 0..100"),
        ("json = 5", "sets 'generate.json' to 5: this flag is a switch. Give true or false"),
        ('stop = [["a"]]', "sets 'generate.stop' to [['a']]"),
        ('stop-token-id = [1, "x"]', "sets 'generate.stop-token-id' to [1, 'x']: 'x' is not a whole number"),
        ("model = {a = 1}", "sets 'generate.model' to {'a': 1}"),
    ],
)
def test_a_wrong_value_in_a_file_is_blamed_on_file_and_key(
    invoke: Invoke, opened: dict[str, Any], tmp_path: Path, line: str, told: str
) -> None:
    file = tmp_path / "forerun.toml"
    file.write_text(f"[generate]\n{line}\n")
    result = invoke("--config", str(file), "generate", "x", "--max-tokens", "3")
    assert result.exit_code == 2
    assert f"The configuration file {file} {told}" in result.stderr
    assert "model" not in opened


def test_a_file_may_give_a_repeated_flag_one_value(invoke: Invoke, opened: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "forerun.toml"
    file.write_text('[generate]\nstop = "a b"\nstop_token_id = 7\n')
    assert invoke("--config", str(file), "generate", "x").exit_code == 0
    params = opened["llm"].requests[-1][1]
    assert (params.stop, params.stop_token_ids) == (("a b",), (7,))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[generate]\nmax-token = 5\n", "max_tokens"),
        ("[generates]\n", "generate"),
        ("[generate]\nmodel = \n", "TOML"),
        ("[generate]\nmodel = " + "[" * 10_000, "TOML"),
        ("[generate]\nmax_tokens = " + "9" * 5_000, "TOML"),
        ("[generate]\nmodel = '\udce9'\n", "TOML"),
        ('[generate]\ndrafter = "os.path:join"\n', "may not name code"),
        ('[generate]\ndrafter = "hybrid:sources=suffix+theirs:Theirs:width=3"\n', "import theirs:Theirs"),
        ('[demo]\ndrafters = "suffix,theirs:Theirs"\n', "import theirs:Theirs"),
    ],
)
def test_a_wrong_configuration_file_is_refused(
    invoke: Invoke, opened: dict[str, Any], tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "forerun.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    result = invoke("--config", str(file), "generate", "x")
    assert result.exit_code == 2
    assert told in result.stderr and str(file) in result.stderr


def test_a_missing_configuration_file_is_refused(invoke: Invoke) -> None:
    result = invoke("--config", "no/such.toml", "generate", "x")
    assert result.exit_code == 2
    assert "no/such.toml" in result.stderr


SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize(
    ("arguments", "grammar"),
    [
        ([], None),
        (["--json-object"], Grammar.json_object()),
        (["--json-schema", SCHEMA], Grammar.json_schema(SCHEMA)),
        (["--json-schema", "@schema.json"], Grammar.json_schema(SCHEMA)),
        (["--regex", "a+"], Grammar.regex("a+")),
        (["--lark", 'start: "a"'], Grammar.lark('start: "a"')),
    ],
)
def test_what_the_output_must_be(
    invoke: Invoke,
    opened: dict[str, Any],
    arguments: list[str],
    grammar: Grammar | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(SCHEMA)
    assert invoke("generate", "x", *arguments).exit_code == 0
    ((_, params),) = opened["llm"].requests
    assert params.grammar == grammar


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json-object", "--regex", "a"], "Give one of them"),
        (["--json-schema", "{"], "not JSON"),
        (["--json-schema", "@nowhere.json"], "cannot be read"),
        (["--regex", ""], "empty"),
    ],
)
def test_forms_that_are_refused_before_the_model_is_opened(
    invoke: Invoke, opened: dict[str, Any], arguments: list[str], reason: str
) -> None:
    result = invoke("generate", "x", *arguments)
    assert result.exit_code != 0
    assert reason in result.stderr
    assert "model" not in opened


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tensor-parallel"])
def test_several_processes_are_refused_before_a_model_is_loaded(
    invoke: Invoke, opened: dict[str, Any], flag: str
) -> None:
    result = invoke("serve", "bundled", flag, "2")
    assert result.exit_code == 2 and "model" not in opened
    assert "tensor_parallel_size is 2, but forerun computes a model in one process." in " ".join(result.stderr.split())


def test_a_chat_template_of_a_file(invoke: Invoke, opened: dict[str, Any], tmp_path: Path) -> None:
    flags = ["--chat-template", str(tmp_path / "it.jinja")]
    result = invoke("generate", "a prompt", *flags)
    assert result.exit_code == 2 and "it.jinja: it cannot be read" in result.stderr
    (tmp_path / "it.jinja").write_text("{{ messages }}")
    assert invoke("generate", "a prompt", *flags).exit_code == 0 and opened["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(("text", "code"), [("a prompt", 0), ("", 2)])
def test_what_it_opened_is_closed(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    closed = []
    close = LLM.close

    def noted(llm: LLM) -> None:
        closed.append(llm.engine.remembered)
        close(llm)

    monkeypatch.setattr(LLM, "close", noted)
    path = tmp_path / "answers"
    made = invoke("generate", text, "--model", "bundled", "--drafter", "suffix", "--remember", str(path))
    assert made.exit_code == code, made.output
    assert [each is not None for each in closed] == [True]
