"""Workers without Ray: what becomes of the work of one that dies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forerun.engine import LLM, EngineThread
from forerun.errors import ConfigError, ReplicaError
from forerun.integrations.ray import batch
from forerun.integrations.ray.batch import RayWorker, answer_on_ray
from forerun.integrations.ray.plan import RayOptions
from forerun.server.batch.files import BatchJournal
from forerun.server.batch.lines import BatchFile
from serving import fake_llm

OPTIONS = RayOptions(ray=True, replicas=2, replica_threads=1)
WORKER: dict[str, Any] = {"model": "it", "drafter": "none", "llm": {}, "name": "it", "seed": 3}


class RayActorError(Exception):
    """As Ray's is called."""


class Handle:
    """An actor's handle: what Ray would call in another process is called here.

    deaths: how many calls end the worker after their first item.
    """

    deaths = 0

    def __init__(self, worker: RayWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        if name == "options":
            return lambda **_: self
        self._name = name
        return self

    def remote(self, *arguments: Any) -> Any:
        return self._items(getattr(self._worker, self._name), arguments)

    def _items(self, method: Any, arguments: Any) -> Iterator[Any]:
        for number, item in enumerate(method(*arguments)):
            if number and Handle.deaths:
                Handle.deaths -= 1
                raise RayActorError
            yield item


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """What every worker has; Ray is a few lines."""
    ray: Any = ModuleType("ray")
    ray.wait = lambda calls, **_: ([calls[-1]], calls[:-1])
    ray.get = lambda item: item
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delitem(sys.modules, "forerun.integrations.ray.pool", raising=False)
    from forerun.integrations.ray.pool import WorkerPool

    made = fake_llm()
    Handle.deaths = 0
    with EngineThread(made.shared) as thread:

        def start() -> Handle:
            worker = RayWorker(**WORKER, threads=1)
            worker._loaded = made, thread
            return Handle(worker)

        @contextmanager
        def pool(options: RayOptions, worker: Any, begin: Any) -> Iterator[WorkerPool]:
            yield WorkerPool(options.replicas, start, begin)

        monkeypatch.setattr(batch, "_pool", pool)
        yield made
    sys.modules.pop("forerun.integrations.ray.pool")  # it knows those few lines alone


def requests(path: Path, count: int) -> None:
    body = {"prompt": "abc", "max_tokens": 4}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("deaths", [0, 1, 2, 3])
def test_workers_that_die_while_they_load_are_replaced(llm: LLM, deaths: int) -> None:
    from forerun.integrations.ray import pool

    left = [RayActorError("the process was killed by the OOM killer due to ...")] * deaths

    def get(_: object) -> None:
        if left:
            raise left.pop()

    pool.ray.get = get
    started: list[Any] = []
    worker: Any = SimpleNamespace(load=SimpleNamespace(remote=object))
    made = pool.WorkerPool(2, lambda: started.append(worker) or worker, lambda *_: None)
    if deaths == 3:
        with pytest.raises(ReplicaError, match="3 workers have ended while they loaded the model"):
            made.load()
    else:
        made.load()
        assert len(started) == 2 + deaths and len(made._workers) == 2


def test_what_a_worker_cannot_load_is_said(llm: LLM) -> None:
    from forerun.integrations.ray import pool

    def get(_: object) -> None:
        raise ConfigError("no such model")

    pool.ray.get = get
    worker: Any = SimpleNamespace(load=SimpleNamespace(remote=object))
    with pytest.raises(ConfigError, match="no such model"):
        pool.WorkerPool(1, lambda: worker, lambda *_: None).load()


@pytest.mark.parametrize("deaths", [0, 2])
def test_a_batch(llm: LLM, tmp_path: Path, deaths: int) -> None:
    requests(tmp_path / "in", 60)
    Handle.deaths = deaths
    told: list[tuple[int, int]] = []
    with BatchFile(tmp_path / "in") as asked, BatchJournal(tmp_path / "journal", {}, 60) as journal:
        journal.add(7, {"is": "there"})
        more: dict[str, Any] = {"on_loaded": lambda: None, "on_answer": lambda *numbers: told.append(numbers)}
        answer_on_ray(tmp_path / "in", asked, journal, WORKER, OPTIONS, **more)
        assert journal.num_done == 60 and journal.get(7) == {"is": "there"}
        assert [journal.get(index)["custom_id"] for index in range(60) if index != 7] == [
            str(index) for index in range(60) if index != 7
        ]
    assert len(told) == 59 and told[-1][0] > 0 and Handle.deaths == 0


def test_work_that_ends_every_worker_is_given_up(llm: LLM, tmp_path: Path) -> None:
    requests(tmp_path / "in", 60)
    Handle.deaths = 1000
    with BatchFile(tmp_path / "in") as asked, BatchJournal(tmp_path / "journal", {}, 60) as journal:
        more: dict[str, Any] = {"on_loaded": lambda: None, "on_answer": lambda *numbers: None}
        with pytest.raises(ReplicaError, match="3 workers have ended, one after another"):
            answer_on_ray(tmp_path / "in", asked, journal, WORKER, OPTIONS, **more)
        assert journal.num_done


def test_what_a_worker_raises_is_raised_here(llm: LLM, tmp_path: Path) -> None:
    requests(tmp_path / "in", 60)
    with BatchFile(tmp_path / "in") as asked, BatchJournal(tmp_path / "journal", {}, 60) as journal:
        more: dict[str, Any] = {"on_loaded": lambda: None, "on_answer": lambda *numbers: None}
        with pytest.raises(ConfigError, match="cannot be read by a worker"):
            answer_on_ray(tmp_path / "nowhere", asked, journal, WORKER, OPTIONS, **more)
