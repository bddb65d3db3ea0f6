"""The libraries of the server's page: `python -m tools.page_libraries` takes those of `versions.json` anew from npm.

`python -m tools.page_libraries marked=18.3.0` takes another version of one, and notes its checksums. npm itself checks
what it loads against the registry's; where a file differs from a checksum that is noted, nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VENDOR = Path(__file__).parents[1] / "src" / "forerun" / "server" / "page" / "vendor"
VERSIONS = VENDOR / "versions.json"


def sha256(content: bytes) -> str:
    """Return the checksum of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def files_of(package: str, version: str, paths: Mapping[str, str]) -> dict[str, bytes]:
    """Return files of a package of npm: name here -> content.

    Args:
        paths: name here -> path in the package.

    Raises:
        CalledProcessError: npm has no such version, or cannot be reached.
    """
    with TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{package}@{version}"]
        packed = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
        with tarfile.open(Path(folder) / packed) as archive:
            found = {name: archive.extractfile(f"package/{path}") for name, path in paths.items()}
            return {name: file.read() for name, file in found.items() if file is not None}


def renew(wanted: Mapping[str, str]) -> None:
    """Write all files anew. wanted: package -> another version. Exits with a sentence where a file is not as noted."""
    noted: dict[str, dict[str, Any]] = json.loads(VERSIONS.read_text(encoding="utf-8"))
    if unknown := wanted.keys() - noted.keys():
        sys.exit(f"The page has no library {min(unknown)}; it has {', '.join(noted)}.")
    written: dict[str, bytes] = {}
    for package, about in noted.items():
        version = wanted.get(package, about["version"])
        files = files_of(package, version, about["files"])
        sums = {name: sha256(content) for name, content in files.items()}
        if version == about["version"] and sums != about["sha256"]:
            sys.exit(f"{package} {version} is not what versions.json notes. Nothing was written.")
        about |= {"version": version, "sha256": sums}
        written |= files
    for name, content in written.items():
        (VENDOR / name).write_bytes(content)
    VERSIONS.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    renew(dict(each.split("=", 1) for each in sys.argv[1:]))
