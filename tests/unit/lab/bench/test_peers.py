"""Peers that do well and peers that do not: the table goes on, and says who was left out and why."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from fake_peers import BODIES, SCRIPTS, fake_interpreter
from forerun.errors import ConfigError
from forerun.lab.bench.peers import peer as one_peer
from forerun.lab.bench.peers.peer import Peer, PeerAnswer, PeerError, PeerProcess
from forerun.lab.bench.peers.rows import classes, peers_report
from forerun.lab.bench.peers.run import MeasuredPeers, Peers, PeerSpec, own_start, read_spec, run_peers, start_of
from forerun.lab.bench.prompts import BenchPrompt, check_lengths
from forerun.lab.results.schema import TargetFacts
from measured import QUIET

OWN = own_start("m", {}, "bfloat16", 1)
REQUESTS = [BenchPrompt("a", "x", [1, 2]), BenchPrompt("b", "y", [2, 3]), BenchPrompt("c", "x", [5, 4])]


def started(peers: Peers, *programs: Path) -> None:
    for program in programs:
        peers.start(start_of(PeerSpec("transformers", str(program), "m", None, program.name, "10"), OWN))


def run(*programs: Path, requests: list[BenchPrompt] = REQUESTS, rounds: int = 1) -> MeasuredPeers:
    ready: list[str] = []
    with closing(Peers(ready.append)) as peers:
        started(peers, *programs)
        return run_peers(peers, requests, 6, rounds)


def test_peers_take_turns_and_are_compared(tmp_path: Path) -> None:
    measured = run(fake_interpreter(tmp_path), fake_interpreter(tmp_path, seconds=0.5), rounds=2)
    assert measured.left_out == []
    assert {len(each) for each in measured.answers.values()} == {6}
    (whole,) = classes(measured, "good-bfloat16-0.5")
    assert whole.reference == "good-bfloat16-0.5, plain"
    one, lookup, fast, _ = whole.rows
    assert (one.bits, one.label) == (16, "good-bfloat16-1.0, plain")
    assert one.tokens_per_second.median == pytest.approx(6)
    assert one.over_reference.median == pytest.approx(0.5)
    assert fast.over_reference.median == 1
    assert lookup.over_plain is not None and lookup.over_plain.median == pytest.approx(2)
    assert (one.mean_acceptance_length, lookup.mean_acceptance_length) == (1, 2)
    assert (lookup.same_text, lookup.same_as_forerun, lookup.shared_prefix) == (1, 1, 6)
    assert one.first_token is not None and one.first_token.median == 0.1
    assert one.decoding is not None and one.decoding.median == pytest.approx(5 / 0.9)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("crashes at the second prompt", "plain: it ended with exit code 3"),
        ("exits at start", "it ended with exit code 1: no such library"),
        ("prints garbage", "it printed something that is no reply"),
        ("prints another object", "its reply: ready is missing"),
        ("prints no line", "it printed something that is no reply"),
    ],
)
def test_the_others_go_on_without_a_bad_peer(tmp_path: Path, kind: str, reason: str) -> None:
    bad, good = fake_interpreter(tmp_path, kind), fake_interpreter(tmp_path)
    measured = run(bad, good)
    assert [peer.name for peer in measured.peers] == [good.name]
    (left_out,) = measured.left_out
    assert left_out.peer == bad.name and left_out.reason.startswith(reason)
    assert set(measured.answers) == {(good.name, "plain"), (good.name, "prompt lookup")}
    assert {len(each) for each in measured.answers.values()} == {len(REQUESTS)}


@pytest.mark.parametrize(
    ("kind", "limit"), [("hangs at the second prompt", "PROMPT_LIMIT"), ("never gets ready", "LOAD_LIMIT")]
)
def test_a_peer_that_hangs_is_ended(tmp_path: Path, kind: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_peer, limit, 0.3)
    measured = run(fake_interpreter(tmp_path, kind))
    assert (measured.peers, measured.answers) == ([], {})
    assert "no answer within 0.3 seconds" in measured.left_out[0].reason


def test_a_method_that_fails_is_left_out_alone_and_nothing_of_the_prompt_is_told(tmp_path: Path) -> None:
    half = fake_interpreter(tmp_path, "fails in one method")
    early = fake_interpreter(tmp_path, "stops early")
    measured = run(half, early)
    assert set(measured.answers) == {(half.name, "plain")}
    reasons = {each.peer: each.reason for each in measured.left_out}
    assert reasons[f"{half.name}, prompt lookup"] == "it reported RuntimeError"
    assert reasons[f"{early.name}, plain"] == "it gave 5 tokens in place of 6"
    assert "secret" not in str(measured.left_out)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    peers = Peers(lambda _: None)
    for text, reason in [
        (f"openvino={tmp_path}/python:model={tmp_path}", "cannot be started: No such file"),
        (f"llama.cpp={tmp_path}:model={tmp_path}", "No such file or directory"),
    ]:
        assert peers.start(start_of(read_spec(text), OWN)) is None
        assert reason in peers.left_out[-1].reason
    (tmp_path / "text").write_text("no program")
    with pytest.raises(PeerError, match="cannot be started"):
        PeerProcess([str(tmp_path / "text")], 1)


def test_a_long_request_to_a_process_that_never_reads() -> None:
    """The pipe holds 64 KiB: the thread that writes is ended with the process, and its temporary folder is gone."""
    worker, caught = PeerProcess([sys.executable, "-S", "-c", "import time; time.sleep(600)"], 1), []

    def exchange() -> None:
        try:
            worker.exchange({"ids": "1" * (1 << 20)}, 0.3)
        except PeerError as error:
            caught.append(str(error))

    asking = threading.Thread(target=exchange, daemon=True)
    asking.start()
    asking.join(30)
    assert caught == ["no answer within 0.3 seconds"]
    assert not Path(worker._scratch.name).exists()


def test_processes_end_with_the_block(tmp_path: Path) -> None:
    processes = []

    def interrupted() -> None:
        with closing(Peers(lambda _: None)) as peers:
            started(peers, fake_interpreter(tmp_path))
            (peer,) = peers.running.values()
            processes.append(peer.worker._process)
            peer.generate("plain", [1], 6)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (process,) = processes
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_classes_of_precision_and_their_references(tmp_path: Path) -> None:
    programs = [fake_interpreter(tmp_path, precision=name) for name in ("bfloat16", "Q4_1", "int8", "unknown", "q4_0")]
    measured = run(*programs, requests=REQUESTS[:1])
    found = classes(measured, programs[0].name)
    assert [each.bits for each in found] == [16, 8, 4, None]
    assert [each.title for each in found] == ["16 bit", "8 bit", "4 bit", "Unknown precision"]
    assert found[2].reference == f"{programs[1].name}, plain"
    assert len(found[2].rows) == 4


def test_the_report_names_instruction_sets_and_who_is_missing(tmp_path: Path) -> None:
    old, new = fake_interpreter(tmp_path), fake_interpreter(tmp_path, precision="int8", instructions="AVX2 AVX512_VNNI")
    measured = run(old, new, fake_interpreter(tmp_path, "exits at start"))
    made = peers_report(measured, old.name, "3 prompts", TargetFacts("m"), {"model": "m"}, avx512=True)
    text = made.text(QUIET, markdown=True)
    assert "AVX2; without AVX-512, which the processor has" in text and "AVX512_VNNI;" not in text
    assert f"### 16 bit, 3 prompts; ratios over {old.name}, plain" in text
    assert "### Left out" in text and "no such library" in text
    assert [each["bits"] for each in made.details["peers"]] == [16, 8]


def test_all_generate_as_many_tokens_as_forerun_until_the_end_of_text(tmp_path: Path) -> None:
    """The fake's text goes on from the last token of the prompt, and 9 ends it."""
    with closing(Peers(lambda _: None)) as peers:
        started(peers, fake_interpreter(tmp_path), fake_interpreter(tmp_path, precision="int8"))
        own = next(iter(peers.running.values()))
        requests = [BenchPrompt("a", "", [7]), BenchPrompt("b", "", [9]), BenchPrompt("c", "", [0])]
        measured = run_peers(peers, requests, 6, 1, own)
    assert [[list(each.token_ids) for each in of] for of in measured.answers.values()] == [
        [[7, 8, 9], [9, 10], [0, 1, 2, 3, 4, 5]]
    ] * 4


def test_equal_names_get_numbers(tmp_path: Path) -> None:
    with closing(Peers(lambda _: None)) as peers:
        for _ in range(2):
            spec = PeerSpec("transformers", str(fake_interpreter(tmp_path)), "m", None, "", "10")
            peers.start(start_of(spec, OWN))
        assert list(peers.running) == ["transformers bfloat16", "transformers bfloat16 #2"]


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    check_lengths([BenchPrompt("a", "", [1] * 10)], 6, 16, "m")
    with pytest.raises(ConfigError, match="a has 10 tokens"):
        check_lengths([BenchPrompt("a", "", [1] * 10)], 6, 15, "m")


def test_the_peers_are_started_with_their_own_programs() -> None:
    spec = read_spec("llama.cpp=/bin:model=/m.gguf,draft=/d.gguf")
    own = own_start("target", {"a": "suffix"}, "bfloat16", 2)
    start = start_of(spec, own)
    assert start.command[1:] == ["-m", "forerun.lab.bench.peers.llama_worker"] and start.text == "llama.cpp, /m.gguf"
    assert start.options == {
        "kind": "llama.cpp",
        "name": "",
        "program": "/bin",
        "model": "/m.gguf",
        "file_type": None,
        "draft": "/d.gguf",
        "dtype": "bfloat16",
        "threads": 2,
        "lookup": "ngram-simple",
    }
    assert start_of(read_spec("transformers=/python"), own).options["model"] == "target"
    assert start_of(read_spec("openvino=/python:lookup=none"), own).options["lookup"] is None
    again = start_of(read_spec("forerun=/python:instructions=avx2"), own)
    assert again.command == ["/python", "-m", "forerun.lab.bench.peers.forerun_worker"]
    assert again.options == {**own.options, "instructions": "avx2"} and again.text == "forerun avx2"


def test_an_interrupt_leaves_the_prompts_that_were_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, asked = Peers.generate, []

    def interrupted(
        peers: Peers, peer: Peer, method: str, token_ids: Sequence[int], max_tokens: int
    ) -> PeerAnswer | None:
        asked.append(1)
        if len(asked) == 8:  # both methods warmed up, two prompts, and one method of the third
            raise KeyboardInterrupt
        return generate(peers, peer, method, token_ids, max_tokens)

    monkeypatch.setattr(Peers, "generate", interrupted)
    measured = run(fake_interpreter(tmp_path))
    assert measured.interrupted and measured.num_answers == 2
    asked[:] = [1] * 7
    with pytest.raises(KeyboardInterrupt):
        run(fake_interpreter(tmp_path))


def test_an_answer_per_token() -> None:
    assert PeerAnswer([1, 2, 3, 4], 2.0, None, None).seconds_per_token == 0.5
    assert set(BODIES).isdisjoint(SCRIPTS)
