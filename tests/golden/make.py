"""Write the golden files: `PYTHONPATH=src:tests python -m golden.make [NAME ...]`, such as `families/llama`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path += map(str, (Path(__file__).parents[1] / "helpers").iterdir())
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FORERUN_COST_CACHE"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(wanted: list[str]) -> None:
    from forerun.kernels.cpu.compiler import library_path
    from golden.texts import FOLDER, PACKAGES, TEXTS, VERSIONS

    library_path(every=True)  # bits are those of each instruction set
    FOLDER.mkdir(exist_ok=True)
    versions = "".join(f"{name} {version(name)}\n" for name in PACKAGES)
    (FOLDER / f"{VERSIONS}.txt").write_text(versions, encoding="utf-8")

    for name in wanted or TEXTS:
        path = FOLDER / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXTS[name](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
