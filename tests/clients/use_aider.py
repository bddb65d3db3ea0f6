"""aider: a file in a repository is edited."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from steps import CHAT, documented, package, step

package("aider-chat")

OPTIONS = "--model openai/smollm2 --edit-format whole --no-git --map-tokens 0 --yes-always --no-check-update"
QUIET = "--no-show-model-warnings --analytics-disable --no-pretty"
SOURCE = "def add(a, b):\n    return a\n"


def edit(*options: str) -> None:
    """Have a file of a folder edited; its model at temperature 0 finds what to do."""
    with TemporaryDirectory() as home:
        path = Path(home) / "calc.py"
        path.write_text(SOURCE)
        command = [sys.executable, "-m", "aider", *OPTIONS.split(), *QUIET.split(), *options]
        settings = dict(re.findall(r"(\w+)=(\S+)", documented("OPENAI_API_BASE", CHAT)))
        environment = os.environ | settings | {"HOME": home}
        done = subprocess.run(
            [*command, "--message", "Return the sum.", path.name],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert "a + b" in path.read_text(), done.stdout + done.stderr


@step
def an_edit_streamed() -> None:
    edit()


@step
def an_edit() -> None:
    edit("--no-stream")
