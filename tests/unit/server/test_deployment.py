"""What docs/serving.md shows for deployment, where its programs are here: nginx, systemd, the parts of the image."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest
import typer

from forerun.cli.main import app
from serving import JSON, LIMIT, fake_llm, serving

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The only code block of docs/serving.md in this language."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(found)


def need(*programs: str) -> None:
    """Skip the test where a program is missing."""
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} is not here")


def test_nginx_passes_streams_on_as_they_come(tmp_path: Path) -> None:
    need("nginx", "openssl")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=llm.example"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(fake_llm(), allowed_host=["llm.example"]) as served:
        served.llm.target.before_forward = lambda _: time.sleep(0.02)  # type: ignore[attr-defined]
        server = block("nginx").replace("http://127.0.0.1:8000", served.url).replace("listen 443", f"listen {port}")
        server = server.replace("/etc/ssl/llm.example.pem", str(certificate)).replace(
            "/etc/ssl/llm.example.key", str(key)
        )
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = " ".join(f"{kind}_temp_path {tmp_path / kind};" for kind in kinds)
        file = tmp_path / "nginx.conf"
        file.write_text(
            f"pid {tmp_path}/pid; daemon off; master_process off; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary}\n{server}}}\n"
        )
        subprocess.run(["nginx", "-t", "-c", file, "-p", tmp_path], check=True, capture_output=True)
        nginx = subprocess.Popen(["nginx", "-c", file, "-p", tmp_path])
        try:
            with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=False, timeout=LIMIT) as http:
                body = {"prompt": "hello", "max_tokens": 24, "stream": True, "temperature": 0, "ignore_eos": True}
                end = time.monotonic() + LIMIT
                while True:
                    try:
                        assert http.get("/health", headers={"host": "llm.example"}).status_code == 200
                        break
                    except httpx.ConnectError:
                        assert time.monotonic() < end
                headers = JSON | {"host": "llm.example"}
                with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    pieces = list(answer.iter_raw())
                assert len(pieces) > 5 and pieces[-1].endswith(b"data: [DONE]\n\n")
        finally:
            nginx.terminate()
            nginx.wait(LIMIT)


def test_a_proxy_tells_whose_requests_it_forwards() -> None:
    """What nginx is told to add: API keys read the metrics on this machine alone."""
    with serving(fake_llm(), api_key=["a-key"]) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as http:
        key = {"authorization": "Bearer a-key"}
        assert http.get("/metrics", headers=key).status_code == 200
        assert http.get("/metrics", headers=key | {"x-forwarded-for": "203.0.113.9"}).status_code == 403


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    need("systemd-analyze")
    file = tmp_path / "forerun.service"
    file.write_text(block("ini").replace("/opt/forerun/bin/forerun", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=LIMIT)
    told = [line for line in done.stderr.splitlines() if "forerun.service" in line]
    assert (done.returncode, told) == (0, [])


def test_the_parts_of_the_image() -> None:
    """Docker itself is not needed: what it would copy, install, start and ask."""
    for copied in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"'\.\[(\w+)\]'", DOCKERFILE) == ["server"] and "server" in extras
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (run,) = re.findall(r"^docker run .*$", text, re.MULTILINE)
    words = shlex.split(run)
    command = typer.main.get_command(app).commands[entry[1]]  # type: ignore[attr-defined]
    context = command.make_context("serve", [*entry[2:], *words[words.index("forerun") + 1 :]])
    assert (context.params["model"], context.params["host"]) == ("/models/your-model", "0.0.0.0")
    (asked,) = re.findall(r"^HEALTHCHECK .*CMD (.*)$", DOCKERFILE, re.MULTILINE)
    with serving(fake_llm()) as served:
        program = json.loads(asked.replace("http://127.0.0.1:8000", served.url))[2]
        subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)
