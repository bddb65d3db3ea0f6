"""Agents in a terminal: each has a file edited, as the scripted model's calls say, by the settings of docs/serving.md.

They run in a folder and with an environment of their own, so that they find neither accounts nor settings.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from steps import SCRIPTED, documented, package, step

PACKAGES = Path("build/clients/agents/node_modules").absolute()
BEFORE, AFTER = "def add(a, b):\n    return a\n", "def add(a, b):\n    return a + b\n"
OLD, NEW = "return a\n", "return a + b\n"
LIMIT = 240.0
"""Seconds of an edit: some start for half a minute, and their prompts are long."""


@dataclass(frozen=True)
class Agent:
    """One agent.

    Attributes:
        package: its npm package.
        command: a request on standard input is answered without a person.
        word: of the code block of docs/serving.md that configures it.
        settings: where this block goes; "": its lines `export NAME=VALUE` are the environment.
        calls: tool and arguments; FILE is the path of the file.
    """

    package: str
    command: Sequence[str]
    word: str
    settings: str
    calls: Sequence[tuple[str, Mapping[str, object]]]


EDIT = {"old_string": OLD, "new_string": NEW}
AGENTS = (
    Agent(
        "@openai/codex",
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"],
        "model_provider",
        ".codex/config.toml",
        [("exec_command", {"cmd": "sed -i 's/return a$/return a + b/' FILE"})],
    ),
    Agent(
        "opencode-ai",
        ["opencode", "run"],
        "opencode.ai/config.json",
        ".config/opencode/opencode.json",
        [("read", {"filePath": "FILE"}), ("edit", {"filePath": "FILE", "oldString": OLD, "newString": NEW})],
    ),
    Agent(
        "@qwen-code/qwen-code",
        ["qwen", "--auth-type", "openai", "--approval-mode", "yolo"],
        "OPENAI_MODEL",
        "",
        [("read_file", {"file_path": "FILE"}), ("edit", {"file_path": "FILE", **EDIT})],
    ),
    Agent(
        "@anthropic-ai/claude-code",
        ["claude", "--print", "--permission-mode", "acceptEdits"],
        "ANTHROPIC_BASE_URL",
        "",
        [("Read", {"file_path": "FILE"}), ("Edit", {"file_path": "FILE", **EDIT})],
    ),
)


def edit(agent: Agent) -> None:
    """Have a file edited."""
    block = documented(agent.word, SCRIPTED).replace("32768", "1000000")  # the scripted model's tokens are bytes
    with TemporaryDirectory(dir=Path.home(), prefix="agent-") as home:  # codex refuses a home below /tmp
        file = Path(home, "work", "calc.py")
        file.parent.mkdir()
        file.write_text(BEFORE)
        path = f"{PACKAGES / 'node/bin'}:{PACKAGES / '.bin'}:/usr/bin:/bin"
        environment = {"PATH": path, "HOME": home, "LANG": "C.UTF-8"}
        if agent.settings:
            settings = Path(home, agent.settings)
            settings.parent.mkdir(parents=True)
            settings.write_text(block)
        else:
            environment |= dict(re.findall(r"(\w+)=(\S+)", block))
        lines = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in agent.calls]
        task = "Fix calc.py.\n" + "".join(f"CALL {line}\n".replace("FILE", str(file)) for line in lines)
        done = subprocess.run(
            agent.command,
            cwd=file.parent,
            env=environment,
            input=task,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert file.read_text() == AFTER, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
        assert "Done." in done.stdout, done.stdout[-1000:]


for agent in AGENTS:
    found = json.loads((PACKAGES / agent.package / "package.json").read_text())
    package(agent.package, found["version"])

    @step
    def an_edit(agent: Agent = agent) -> None:
        edit(agent)
