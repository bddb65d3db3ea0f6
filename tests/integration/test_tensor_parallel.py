"""Two processes that compute one model: the same bits with every drafter, and the end of both when one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafter_rows import rows
from families import make_family
from forerun import LLM, SamplingParams, workloads
from forerun.models import find_tokenizer, load_model
from heads import text_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="ranks are looked up in /proc"),
]
K, NUM_NEW = 6, 20
KILLED, STOPPED = 10.0, 30.0
"""Seconds after which a rank that was killed, or stopped, has ended all."""
GENERATE = ["generate", "def f(", "--model", "bundled", "--dtype", "float32", "--ignore-eos", "--temperature", "0"]
LONG = [*GENERATE, "--max-tokens", "1500", "--tensor-parallel", "2", "--drafter", "none"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def plain(request: pytest.FixtureRequest) -> Iterator[LLM]:
    is_int8 = request.param == "int8"
    llm = LLM(
        "bundled",
        None,
        dtype="bfloat16" if is_int8 else request.param,
        quantize="int8" if is_int8 else None,
        tensor_parallel=2,
    )
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[Any]:
    assert plain.tokenizer is not None
    cases = workloads.load("code", 3)
    return [plain.tokenizer(case.prompt)["input_ids"][-60:] * 2 for case in cases]


def answers(llm: LLM, prompts: list[Any], predictions: list[Any] | None = None) -> list[Any]:
    """Greedy and seeded: tokens, and the bits of their log-probabilities."""
    found = []
    for options in ({"temperature": 0}, {"seed": 11, "temperature": 0.9}):
        params = SamplingParams(**options, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
        every = [replace(params, prediction=prediction) for prediction in predictions or [None] * len(prompts)]
        for generation in llm.generate(prompts, every):
            assert generation.logprobs is not None
            found.append((generation.token_ids, [entry.logprob for entry in generation.logprobs]))
    return found


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[Any]) -> list[Any]:
    return answers(plain, prompts)


@pytest.mark.parametrize("drafter", rows())
def test_every_drafter_gives_the_bits_of_plain_decoding(
    plain: LLM, prompts: list[Any], expected: list[Any], drafter: str
) -> None:
    assert plain.exact, plain.target.exactness.reason
    llm = LLM(plain.target, text_of(drafter), num_draft_tokens=K, tokenizer=plain.tokenizer)
    assert llm.drafter is not None
    reads = llm.drafter.traits.reads_prediction
    predictions = [tokens for tokens, _ in expected[: len(prompts)]] if reads else None
    assert answers(llm, prompts, predictions) == expected


def test_codes_give_the_bits_of_one_process(plain: LLM, prompts: list[Any], expected: list[Any]) -> None:
    if plain.target.quantize != "int8":
        pytest.skip("sums of floats over two ranks have another order than in one process")
    one = LLM(load_model("bundled", quantize="int8"), None, tokenizer=plain.tokenizer)
    assert answers(one, prompts) == expected


def test_float64_gives_the_tokens_of_one_process() -> None:
    tokenizer = find_tokenizer("bundled")
    params = SamplingParams(temperature=0, max_tokens=40)
    texts = [case.prompt for case in workloads.load("code", 2)]
    one = LLM(load_model("bundled", "float64"), None, tokenizer=tokenizer).generate(texts, params)
    two = LLM("bundled", None, dtype="float64", tensor_parallel=2)
    try:
        assert [g.token_ids for g in two.generate(texts, params)] == [g.token_ids for g in one]
    finally:
        two.close()


class Run:
    """A command in a process group of its own, which is streaming an answer."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.read(1)  # steps are being computed

    def ranks(self) -> list[int]:
        """Those that the process has started, the oldest first."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found]

    def members(self) -> list[int]:
        """All processes of the group that have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else None
            except OSError:
                continue
            if fields and int(fields[2]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return found

    def ends(self, seconds: float) -> bool:
        """Whether nothing is left after so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.process.poll()
            if not self.members():
                return True
            time.sleep(0.1)
        return False

    def close(self) -> tuple[int | None, str]:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        _, errors = self.process.communicate()
        return self.process.returncode, errors.decode()


@pytest.mark.parametrize(("number", "limit"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)])
def test_a_follower_that_is_lost_ends_all(number: signal.Signals, limit: float) -> None:
    run = Run("-m", "forerun", *LONG)
    try:
        (follower,) = run.ranks()
        os.kill(follower, number)
        assert run.ends(limit), run.members()
    finally:
        code, errors = run.close()
    assert code == 2, errors
    assert f"Rank 1 (process {follower}" in errors
    assert ("ended" if number == signal.SIGKILL else "stopped") in errors


def test_a_leader_that_is_killed_ends_all() -> None:
    run = Run("-m", "forerun", *LONG)
    try:
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.ends(KILLED), run.members()
    finally:
        _, errors = run.close()
    assert f"Rank 0 (process {run.process.pid}" in errors


def test_a_leader_that_is_stopped_ends_the_others_and_itself_when_it_goes_on() -> None:
    run = Run("-m", "forerun", *LONG)
    try:
        (follower,) = run.ranks()
        os.kill(run.process.pid, signal.SIGSTOP)
        end = time.monotonic() + STOPPED
        while time.monotonic() < end and follower in run.members():
            time.sleep(0.1)
        assert run.members() == [run.process.pid]
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.ends(KILLED)
    finally:
        code, errors = run.close()
    assert code == 2, errors
    assert f"Rank 0 (process {run.process.pid}" in errors
    assert "is stopped" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_is_lost_ends_all(number: signal.Signals, free_port: int) -> None:
    run = Run(*TORCHRUN, str(free_port), "-m", "forerun", *LONG)
    try:
        os.kill(run.process.pid, number)
        assert run.ends(KILLED if number == signal.SIGKILL else STOPPED), run.members()
    finally:
        run.close()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_torchrun_gives_the_bits_of_spawned_ranks(free_port: int) -> None:
    short = [*GENERATE, "--max-tokens", "24", "--tensor-parallel", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    tokens = []
    for command in (["-m", "forerun"], [*TORCHRUN, str(free_port), "-m", "forerun"]):
        done = subprocess.run([sys.executable, *command, *short], capture_output=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        answer = json.loads(done.stdout)
        assert answer["exact"]
        tokens.append([choice["token_ids"] for choice in answer["choices"]])
    assert tokens[0] == tokens[1]


def test_ranks_of_other_instruction_sets_are_refused(free_port: int, tmp_path: Path, native_library: Any) -> None:
    folder = make_family("llama", tmp_path)
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\n"
        "if os.environ['RANK'] == '1': os.environ['FORERUN_INSTRUCTIONS'] = 'portable'\n"
        "from forerun import LLM\n"
        f"LLM({str(folder)!r}, None, dtype='bfloat16', tensor_parallel=2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, *TORCHRUN, str(free_port), str(script)]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300)
    assert done.returncode != 0
    assert "Rank 1 has the kernels native portable" in done.stderr.decode()


def test_a_server_whose_rank_is_lost_answers_503_and_ends(free_port: int) -> None:
    import httpx

    command = ["serve", "bundled", "--dtype", "float32", "--tensor-parallel", "2", "--port", str(free_port)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun", *command], stderr=subprocess.PIPE, start_new_session=True, env=environment
    )
    try:
        assert process.stderr is not None
        while b'"ready"' not in (line := process.stderr.readline()):
            assert line, "the server has ended"
        url = f"http://127.0.0.1:{free_port}/v1/completions"
        body = {"model": "bundled", "prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": False}
        assert httpx.post(url, json={**body, "max_tokens": 3}, timeout=60).status_code == 200
        (follower,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(follower), signal.SIGKILL)
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 503
        assert "Rank 1" in answer.json()["error"]["message"]
        assert process.wait(KILLED) == 2
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
