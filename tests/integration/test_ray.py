r"""Replicas and batches on Ray: what is answered when one of them is killed, and what is said of bad input.

    FORERUN_RAY_PYTHON=ENV/bin/python make test-all ARGS='-s tests/integration/test_ray.py'

ENV is an environment with forerun and `ray[serve]`; without the variable it is this one, if Ray is in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM, SamplingParams
from ray_served import MISSING, PYTHON, Served, forerun, gone, name_of, served, started

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=MISSING)]

NUM_REQUESTS, CLIENTS, KILLS = 200, 8, 10
PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\nfor name in ",
    "x = [1, 2",
    '"""A module of dates."""\n\nfrom datetime import ',
)
TWO = ("bundled", "--ray", "--replicas", "2", "--replica-threads", "1")


@dataclass
class Answer:
    """What became of a request. error: its class and status, or what ended its stream."""

    text: str = ""
    error: str = ""


def asked(count: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randrange(20, 60), "stream": rng.random() < 0.5}
        | ({"temperature": 0} if rng.random() < 0.5 else {"seed": rng.randrange(1000)})
        for _ in range(count)
    ]


def twins(requests: list[dict[str, Any]]) -> list[str]:
    """The texts that they have offline, without speculation."""
    llm = LLM("bundled", None)
    params = [SamplingParams(**{k: v for k, v in each.items() if k not in ("prompt", "stream")}) for each in requests]
    generations = llm.generate([each["prompt"] for each in requests], params)
    return [generation.choices[0].text for generation in generations]


def answer(client: openai.OpenAI, request: dict[str, Any]) -> Answer:
    made = Answer()
    try:
        if not request["stream"]:
            made.text = client.completions.create(model="bundled", **request).choices[0].text
        else:
            for chunk in client.completions.create(model="bundled", **request):
                made.text += chunk.choices[0].text
    except openai.APIStatusError as error:
        made.error = f"status {error.status_code}"
    except openai.APIError as error:
        made.error = f"event, {error.type}" if type(error) is openai.APIError else type(error).__name__
    return made


def killed_half_way(running: Served, requests: list[dict[str, Any]]) -> list[Answer]:
    """Send all of them, and kill a replica when half of them are answered."""
    victim, done = running.engines()[0], threading.Semaphore(0)

    def kill() -> None:
        for _ in range(len(requests) // 2):
            done.acquire()
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with (
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):

        def one(request: dict[str, Any]) -> Answer:
            made = answer(client, request)
            done.release()
            return made

        answers = [*pool.map(one, requests)]
    killer.join()
    assert not name_of(victim)
    return answers


def both_alive(running: Served) -> None:
    end = time.monotonic() + 120
    while len(running.engines()) < 2 or httpx.get(f"{running.url}/health", timeout=30).json().get("replicas") != 2:
        assert time.monotonic() < end
        time.sleep(0.5)


def test_a_replica_is_killed_under_load() -> None:
    requests = asked(NUM_REQUESTS)
    expected = twins(requests)
    with served(*TWO) as running:
        answers = killed_half_way(running, requests)
        assert [(made.text, made.error) for made in answers] == [(text, "") for text in expected]
        print(f"\n{NUM_REQUESTS} requests, none failed; all are their offline twins")


def test_replicas_are_killed_in_the_middle_of_eight_requests() -> None:
    kinds = (
        ("/v1/completions", {"prompt": "# 1\n", "temperature": 0}),
        ("/v1/completions", {"prompt": "# 2\n", "seed": 2, "n": 2}),
        ("/v1/completions", {"prompt": "# 3\n", "temperature": 0, "stream": True}),
        ("/v1/completions", {"prompt": "# 4\n", "seed": 4, "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": ["# 5\n", "# 6\n"], "seed": 5, "logprobs": 1, "stream": True}),
        ("/v1/completions", {"prompt": "# 7\n", "seed": 7, "stop": ["zq"], "stream": True}),
        ("/v1/completions", {"prompt": "# 8\n", "temperature": 0, "logprobs": 0, "stream": True}),
        ("/v1/completions", {"prompt": "# 9\n", "temperature": 0.7, "seed": 9, "stream": True}),
    )
    requests = [(path, {**body, "max_tokens": 400, "ignore_eos": True}) for path, body in kinds]
    with served(*TWO, "--routing", "balanced") as running, ThreadPoolExecutor(len(requests)) as pool:
        ask = partial(texts, running.url)
        expected = [*pool.map(ask, requests)]
        for number in range(KILLS):
            both_alive(running)
            answers = [pool.submit(ask, request) for request in requests]
            time.sleep(0.2 + 0.2 * (number % 5))
            os.kill(running.engines()[number % 2], signal.SIGKILL)
            assert [each.result(timeout=180) for each in answers] == expected
        lost = sum('"lost_replicas"' in line for line in running.lines)
        print(f"\n{KILLS} kills, {KILLS * len(requests)} requests, all with their texts; {lost} went on elsewhere")
        assert lost


def test_replicas_are_killed_before_all_are_ready() -> None:
    """One that has loaded, and one that loads: those that replace them answer."""
    requests = asked(12)
    expected = twins(requests)
    with started(*TWO) as running:
        end, killed = time.monotonic() + 240, set[int]()
        while not running.url:
            assert running.process.poll() is None and time.monotonic() < end, "".join(running.lines[-40:])
            for engine in running.engines()[: 2 - len(killed)]:
                if engine not in killed:
                    killed.add(engine)
                    os.kill(engine, signal.SIGKILL)
            time.sleep(0.01)
        assert len(killed) == 2
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
            ThreadPoolExecutor(CLIENTS) as pool,
        ):
            answers = [*pool.map(partial(answer, client), requests)]
        assert [(made.text, made.error) for made in answers] == [(text, "") for text in expected]


def texts(url: str, request: tuple[str, dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, of a whole answer or a stream."""
    path, body = request
    found: dict[int, str] = {}
    answered = httpx.post(f"{url}{path}", json=body, timeout=180)
    assert answered.status_code == 200, answered.text
    events = [answered.text]
    if "stream" in body:
        events = [line.removeprefix("data: ") for line in answered.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_an_unseeded_stream_ends_with_an_error_event() -> None:
    body = {"prompt": "# 1\n", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1}
    with (
        served("bundled", "--ray", "--replicas", "1", "--replica-threads", "1") as running,
        httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=180) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines) for _ in range(20)]
        os.kill(running.engines()[0], signal.SIGKILL)
        *_, error, done = [line for line in lines if line]
    assert done == "data: [DONE]" and json.loads(error[6:])["error"]["type"] == "server_error"


def test_keys_streams_cancellation_and_the_drain() -> None:
    with served(*TWO, "--api-key", "one", "--api-key", "two") as running:
        http = httpx.Client(base_url=running.url, timeout=60)
        body = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 401
        headers = {"authorization": "Bearer one"}
        pieces: list[float] = []
        with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 100}, headers=headers) as response:
            pieces += [time.monotonic() for line in response.iter_lines() if line.startswith("data: ")]
        assert pieces[-1] - pieces[0] > 0.05, "it came at once"
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.iter_lines()  # kept: an iterator that is forgotten closes the connection
            next(lines)
            assert http.get("/live", headers=headers).json()["running"] == 1
        end = time.monotonic() + 10
        while http.get("/live", headers=headers).json()["running"]:
            assert time.monotonic() < end, "it is still computed"
            time.sleep(0.1)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**body, "stream": False}, headers=headers, timeout=1.0)
        while http.get("/live", headers=headers).json()["running"]:
            assert time.monotonic() < end + 10, "it is still computed"
            time.sleep(0.1)
        metrics = http.get("/metrics", headers=headers)
        told = httpx.get(metrics.json()["error"]["message"].partition("node: ")[2].rstrip("."), timeout=30).text
        end = time.monotonic() + 30
        while "ray_vllm_generation_tokens" not in told or "ray_forerun_http_responses" not in told:
            assert time.monotonic() < end, told[-3000:]
            time.sleep(1)
            told = httpx.get(metrics.json()["error"]["message"].partition("node: ")[2].rstrip("."), timeout=30).text
        assert http.get("/version", headers=headers | {"x-request-id": "mine"}).headers.get_list("x-request-id") == [
            "mine"
        ]
        strangers_are_refused(running.processes())
        with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 600}, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 10
            while http.get("/health").status_code != 503:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"


def strangers_are_refused(processes: list[int]) -> None:
    """No dashboard listens, and the HTTP ports of Ray's own run nothing for somebody without the token."""
    ports = listening(processes)
    assert 8265 not in ports
    statuses = set()
    for port in ports:
        try:
            job = {"entrypoint": "true"}
            for path in ("/api/jobs/", "/api/job_agent/jobs/"):
                answered = httpx.post(f"http://127.0.0.1:{port}{path}", json=job, timeout=5)
                if "# HELP" not in answered.text:  # metrics, whatever is asked
                    statuses.add(answered.status_code)
        except httpx.HTTPError:
            continue  # no HTTP
    print(f"a job posted without the token to each of {len(ports)} ports: {sorted(statuses)}")
    assert statuses and not any(status < 400 for status in statuses)


def listening(processes: list[int]) -> set[int]:
    """Ports on which these processes listen, but those of forerun's own address."""
    sockets = set()
    for process in processes:
        try:
            sockets |= {str(entry.readlink())[8:-1] for entry in Path(f"/proc/{process}/fd").iterdir()}
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def batch_file(path: Path, count: int) -> None:
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": PROMPTS[i % len(PROMPTS)] * (i % 3 + 1), "max_tokens": 20 + i % 40, "seed": i}}
        for i in range(count)
    ]
    texts = [json.dumps(line) for line in lines]
    texts[7] = '{"custom_id": "cut'
    path.write_text("\n".join(texts))


def test_a_batch_is_killed_and_goes_on(tmp_path: Path) -> None:
    source, count = tmp_path / "in.jsonl", 240
    batch_file(source, count)

    def command(out: str, *more: str) -> list[str]:
        return ["batch", str(source), str(tmp_path / out), "--model", "bundled", *more]

    on_ray = ("--ray", "--replicas", "2", "--replica-threads", "1")
    here = forerun(*command("here.jsonl"))
    assert here.communicate(timeout=300) and here.returncode == 0
    expected = (tmp_path / "here.jsonl").read_bytes()
    assert expected.count(b'"status_code": 200') == count - 1
    assert (tmp_path / "here.jsonl.broken").read_text() == '{"custom_id": "cut\n'

    journal = tmp_path / "ray.jsonl.journal"
    for victim in ("driver", "worker"):
        process = forerun(*command("ray.jsonl", *on_ray), start_new_session=True)
        before = lines_of(journal)
        end = time.monotonic() + 240
        while lines_of(journal) < before + count // 4:
            assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=10)[0][-3000:]
            time.sleep(0.01)
        everything = Served(process).processes()
        workers = [each for each in everything if "Worker" in name_of(each)]
        os.kill(process.pid if victim == "driver" else workers[0], signal.SIGKILL)
        said = process.communicate(timeout=300)[0]
        gone(everything, within=180)  # two agents of Ray's look for the killed command's cluster for a minute and more
    assert process.returncode == 0, said
    assert (
        "of 240 requests are answered already" in said
        and "lines without a custom_id that can be read, answered by an error: 1," in said
    )
    assert (tmp_path / "ray.jsonl").read_bytes() == expected
    assert (tmp_path / "ray.jsonl.broken").exists() and not journal.exists()


def test_a_worker_is_killed_while_it_loads(tmp_path: Path) -> None:
    batch_file(tmp_path / "in.jsonl", 20)
    command = (
        "batch",
        "in.jsonl",
        "out.jsonl",
        "--model",
        "bundled",
        "--ray",
        "--replicas",
        "2",
        "--replica-threads",
        "1",
    )
    process = forerun(*command, cwd=tmp_path)
    end, victim = time.monotonic() + 120, 0
    while not victim:
        assert process.poll() is None and time.monotonic() < end
        loading = (each for each in Served(process).processes() if "ray::RayWorker" in name_of(each))
        victim = next(loading, 0)
        time.sleep(0.01)
    assert lines_of(tmp_path / "out.jsonl.journal") <= 1, "it has answered already"
    os.kill(victim, signal.SIGKILL)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert (tmp_path / "out.jsonl").read_bytes().count(b'"status_code": 200') == 19


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("command", [("serve", "bundled"), ("batch", "in.jsonl", "out.jsonl")])
def test_an_address_that_is_no_cluster(command: tuple[str, ...], tmp_path: Path) -> None:
    batch_file(tmp_path / "in.jsonl", 20)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        process = forerun(*command, "--ray", "--ray-address", address, cwd=tmp_path)
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "Nothing that is a Ray cluster has answered" in said, said
    assert time.monotonic() - started < 100


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    batch_file(tmp_path / "in.jsonl", 20)
    for command in (("serve", "./nowhere"), ("batch", "in.jsonl", "out.jsonl", "--model", "./nowhere")):
        process = forerun(*command, "--ray", "--replicas", "1", "--replica-threads", "1", cwd=tmp_path)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 2 and "nowhere" in said, said
