"""`make scale`: llama.cpp is compiled by as many compilers as the machine has processors and memory for."""

import os
import stat
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scale.sh"
PYTHON = f"""#!/bin/sh
case "$2" in
    pip) mkdir -p made/top/vendor/llama.cpp && tar czf build/scale/llama_cpp_python-0.tar.gz -C made top ;;
    pytest) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def test_the_number_of_compilers(tmp_path: Path) -> None:
    programs = {"python": PYTHON, "cmake": f'#!/bin/sh\necho "$@" >> {tmp_path}/cmake.log\n'}
    for name, text in programs.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    given = dict.fromkeys(("VLLM_PYTHON", "RAY_PYTHON", "MODEL"), "given")
    environment = os.environ | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(SCRIPT), str(tmp_path / "python")], cwd=tmp_path, env=environment, check=True)
    *_, flag, count = (tmp_path / "cmake.log").read_text().splitlines()[-1].split()
    assert flag == "--parallel" and 1 <= int(count) <= len(os.sched_getaffinity(0))
