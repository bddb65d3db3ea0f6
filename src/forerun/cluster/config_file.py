"""The file that `serve run` and `serve deploy` take: JSON, which is YAML too."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.cluster.plan import Plan
from forerun.errors import ConfigError
from forerun.files.write import atomic_file, refuse_to_overwrite
from forerun.server.options import ServerOptions

APPLICATION = "forerun"
IMPORT_PATH = "forerun.cluster.application:build"


def deploy_config(plan: Plan, server: ServerOptions) -> dict[str, Any]:
    """The configuration, by Ray Serve's schema."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": server.host, "port": server.port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {"name": APPLICATION, "route_prefix": "/", "import_path": IMPORT_PATH, "args": asdict(plan)},
        ],
    }


def write_config(path: Path, plan: Plan, server: ServerOptions) -> None:
    """Write it, for the user alone to read where it holds keys.

    Raises:
        ConfigError: the file is there, or cannot be written.
    """
    refuse_to_overwrite(path, ConfigError)
    text = json.dumps(deploy_config(plan, server), indent=2) + "\n"
    with atomic_file(path, ConfigError) as file:
        if server.api_key:
            os.fchmod(file.fileno(), 0o600)
        file.write(text.encode())
