"""`make scale`: how llama.cpp is compiled, and where the tests look for what is made."""

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scale.sh"
PYTHON = f"""#!/bin/sh
case "$2" in
    pip) mkdir -p made/top/vendor/llama.cpp && tar czf build/scale/llama_cpp_python-0.tar.gz -C made top ;;
    pytest) env | grep ^FORERUN_ > pytest.log ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def test_what_is_made_is_found_from_everywhere(tmp_path: Path) -> None:
    programs = {"python": PYTHON, "cmake": f'#!/bin/sh\necho "$@" >> {tmp_path}/cmake.log\n'}
    for name, text in programs.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "build" / "scale" / "ray" / "bin").mkdir(parents=True)
    (tmp_path / "build" / "scale" / "ray" / "bin" / "python").symlink_to(tmp_path / "python")
    given = dict.fromkeys(("VLLM_PYTHON", "MODEL"), "given")
    environment = os.environ | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(SCRIPT), str(tmp_path / "python")], cwd=tmp_path, env=environment, check=True)
    configured, built = (tmp_path / "cmake.log").read_text().splitlines()
    *_, flag, count = built.split()
    assert flag == "--parallel" and 1 <= int(count) <= len(os.sched_getaffinity(0))
    assert ("-DCMAKE_CXX_FLAGS=-mno-amx-tile" in configured) == (platform.machine() == "x86_64")
    told = dict(line.split("=", 1) for line in (tmp_path / "pytest.log").read_text().splitlines())
    for name in ("FORERUN_RAY_PYTHON", "FORERUN_LLAMA_CPP"):  # tests run in folders of their own
        assert told[name].startswith(f"{tmp_path}/build/scale/"), told
