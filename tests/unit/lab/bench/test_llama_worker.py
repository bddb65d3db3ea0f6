"""llama.cpp's worker against a server that answers as llama-server does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fake_peers import fake_llama_server
from forerun.lab.bench.peers import llama_worker
from forerun.lab.bench.peers.llama_worker import LlamaCpp
from forerun.lab.bench.peers.run import Peers, own_start, read_spec, start_of


def options(folder: Path, **more: Any) -> dict[str, Any]:
    usual = {"program": str(fake_llama_server(folder)), "model": "m", "draft": None, "threads": 1}
    return {**usual, "lookup": "ngram-simple", **more}


def test_a_server_per_method_and_its_own_timings(tmp_path: Path) -> None:
    peer = LlamaCpp(options(tmp_path, draft="d"))
    try:
        assert peer.ready == {
            "version": "llama.cpp b1-fake",
            "instructions": "SSE3 AVX2",
            "precision": "F32",
            "methods": ["plain", "prompt lookup", "draft model"],
        }
        answer = peer.generate("plain", [1, 2], 6)
        assert answer == {"token_ids": [2] * 6, "seconds": 0.5, "first_seconds": 0.1, "steps": 6}
        assert peer.generate("prompt lookup", [1, 2], 6)["steps"] == 3
        with pytest.raises(RuntimeError, match="status 500") as raised:
            peer.generate("plain", [13], 6)
        assert "secret" not in str(raised.value)
        processes = [server._process for server in peer._servers.values()]
        folder = peer._servers["plain"]._log.parent
        assert folder.is_dir()
    finally:
        peer.close()
    assert all(process.returncode is not None for process in processes)
    assert not folder.exists()


def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 1; the last that it printed: error loading"):
        LlamaCpp(options(tmp_path, model="bad"))


def test_a_system_without_unix_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_worker, "_UNIX", None)
    with pytest.raises(RuntimeError, match="over a Unix socket, which Python does not have on Windows"):
        LlamaCpp(options(tmp_path))


@pytest.mark.slow
def test_it_is_a_peer_like_the_others(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "bad.gguf").touch()
    said: list[str] = []
    with closing(Peers(said.append)) as peers:
        program = fake_llama_server(tmp_path)
        for name in ("model", "bad"):
            spec = read_spec(f"llama.cpp={program}:model={tmp_path}/{name}.gguf")
            peers.start(start_of(spec, own_start("m", {}, "bfloat16", 1)))
        (left_out,) = peers.left_out
        assert left_out.reason.startswith(
            "it ended with exit code 1: RuntimeError: llama-server ended with exit code 1"
        )
        assert left_out.reason.endswith("error loading model")
        (peer,) = peers.running.values()
        assert (peer.name, peer.bits) == ("llama.cpp F32", 32)
        answer = peers.generate(peer, "plain", [1, 2], 6)
        assert answer is not None and list(answer.token_ids) == [2] * 6
