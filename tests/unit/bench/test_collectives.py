"""`forerun bench collectives`: gathers, and a forward by several ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from families import make_family
from forerun.bench import collectives as bench
from forerun.bench.recorded_parts import gather_figures
from forerun.bench.report import Table
from forerun.results import KINDS
from thread_ranks import connected, sharded


def test_every_kind_of_results_has_a_title() -> None:
    assert all(KINDS.values())


def test_gathers_are_timed_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = connected(2)

    def spawned(module: str, count: int, options: Any) -> Any:
        json.dumps(options)

        def run() -> None:
            for rows in options["rows"]:
                for _ in range(options["rounds"]):
                    two.exchange(torch.zeros(rows, options["width"]))

        thread = threading.Thread(target=run)
        thread.start()
        return SimpleNamespace(store=None, check=None, end=lambda: thread.join(10))

    monkeypatch.setattr(bench, "Spawned", spawned)
    monkeypatch.setattr(bench, "join_by_file", lambda *_: one)
    rows = bench.measure(2, (1, 8), 16, 10)
    assert [(row.rows, row.nbytes) for row in rows] == [(1, 64), (8, 512)]
    assert all(0 < row.seconds.median <= row.p99 for row in rows)
    figures = gather_figures(rows, [])
    assert [figure.labels["bytes"] for figure in figures if figure.name == "gather"] == [64, 512]
    assert len(Table.of("x", bench.GATHERS, rows).rows) == 2


def test_forwards_are_timed_beside_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_family("llama", tmp_path)
    threads = torch.get_num_threads()
    with sharded(folder, "bfloat16") as model:
        monkeypatch.setattr(bench, "load_sharded_model", lambda *_: model)
        rows = bench.measure_forwards(folder, "bfloat16", 2, (1, 3), 5, 4, lambda _: None)
    assert torch.get_num_threads() == threads
    assert [(row.rows, row.gathers) for row in rows] == [(1, 5), (3, 5)]
    assert all(row.computing.median < row.whole.median for row in rows)
    assert len(Table.of("x", bench.FORWARDS, rows).rows) == 2
    assert {figure.name for figure in gather_figures([], rows)} >= {"forward", "forward_gathering"}
