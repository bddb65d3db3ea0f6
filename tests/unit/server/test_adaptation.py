"""A server whose drafter learns: its figures, its copy by tenant, and `forerun adapt save`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.errors import ConfigError
from serving import fake_llm, serving


@dataclass
class Progress:
    tokens: int
    is_adapted: bool


class Learnt:
    """Has learnt for the tenant that asks first."""

    closed = False
    first: str | None = None

    def progress(self, tenant: str | None = None) -> Progress:
        self.first = self.first or tenant
        return Progress(7, tenant is not None and tenant == self.first)

    def total(self) -> dict[str, float]:
        names = ("rounds", "steps", "swaps", "swaps_back", "tokens", "memory")
        return {**dict.fromkeys(names, 3), "before": 1.5, "after": 2.25}

    def save(self, folder: str | Path, tenant: str | None = None) -> None:
        if tenant is None or tenant != self.first:
            raise ConfigError("There is no copy.")
        Path(folder, "config.json").write_text("{}")

    def close(self) -> None:
        self.closed = True


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_what_was_learnt_is_told_and_saved_for_its_tenant_alone(tmp_path: Path) -> None:
    llm: Any = fake_llm()
    llm.adapting = learnt = Learnt()
    with serving(llm, api_key=("key-1", "key-2")) as served:
        own = httpx.get(f"{served.url}/v1/adaptation", headers=bearer("key-1")).json()
        assert own == {"tokens": 7, "is_adapted": True}
        refused = httpx.get(f"{served.url}/v1/adaptation/copy", headers=bearer("key-2"))
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, "There is no copy.")
        live = httpx.get(f"{served.url}/live", headers=bearer("key-1")).json()["adaptation"]
        assert live["after"] == 2.25
        metrics = httpx.get(f"{served.url}/metrics", headers=bearer("key-1")).text
        assert 'forerun:adaptation_before{model_name="it"} 1.5' in metrics
        assert 'forerun:adaptation_swaps{model_name="it"} 3.0' in metrics
        runner = CliRunner()
        for key, code in (("key-2", 2), ("key-1", 0), ("key-1", 2)):
            args = ["adapt", "save", str(tmp_path / "copy"), "--url", served.url, "--api-key", key]
            result = runner.invoke(app, args)
            assert result.exit_code == code, result.output
        assert "is there already" in result.output
        assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    assert learnt.closed
    gone = runner.invoke(app, ["adapt", "save", str(tmp_path / "new"), "--url", served.url])
    assert "does not answer" in gone.output


def test_a_server_without_says_how() -> None:
    with serving(fake_llm()) as served:
        for path in ("", "/copy"):
            answer = httpx.get(f"{served.url}/v1/adaptation{path}")
            assert answer.status_code == 404
            assert "Start it with --adapt" in answer.json()["error"]["message"]
        assert "forerun:adaptation" not in httpx.get(f"{served.url}/metrics").text
