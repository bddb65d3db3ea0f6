#!/bin/sh
# Source archive and wheels, checked as a user would have them (make release).
#
#   tests/release.sh PYTHON
#
# PYTHON has the extra `release`; TORCH is what pip installs as torch in the fresh environment. All is made from the source
# archive, so that what it lacks is seen. The native libraries of all platforms are compiled here, by Zig; only the one of
# this machine is loaded. Nothing is uploaded.
set -eu
PYTHON=$1
TORCH=${TORCH:-torch}
cd "$(dirname "$0")/.."
HERE=$PWD
WORK=$HERE/build/release
say() { printf 'release: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/forerun/__init__.py)
[ "$version" ] || fail "src/forerun/__init__.py names no version"
grep -q "^## \[$version\]" CHANGELOG.md || say "note: CHANGELOG.md has no section [$version]; give Unreleased its name first"
[ -z "$(git status --porcelain 2>/dev/null)" ] || say "note: the checkout has changes that are not committed"

say "building $version"
rm -rf "$WORK" && mkdir -p "$WORK" dist
rm -f dist/forerun-*
"$PYTHON" -m build --sdist --outdir dist . >"$WORK/sdist.log" 2>&1 || { cat "$WORK/sdist.log" >&2; exit 1; }
archive=$HERE/dist/forerun-$version.tar.gz
[ -f "$archive" ] || fail "no $archive was made"
mkdir "$WORK/source" && tar -xzf "$archive" -C "$WORK/source" --strip-components 1
wheel() { # NAME [VARIABLE=VALUE ...]
    name=$1 && shift
    say "a wheel for $name"
    (cd "$WORK/source" && env "$@" "$PYTHON" -m build --wheel --outdir "$HERE/dist" .) >"$WORK/$name.log" 2>&1 ||
        { cat "$WORK/$name.log" >&2; exit 1; }
}
wheel any # without compiled kernels
for target in linux-x86_64 linux-aarch64 darwin-arm64 windows-amd64; do
    wheel $target HATCH_BUILD_HOOKS_ENABLE=1 FORERUN_TARGET=$target CXX="$PYTHON -m ziglang c++"
done

say "metadata"
"$PYTHON" -m twine check --strict dist/forerun-*
(cd "$WORK/source" && "$PYTHON" -m tools.wheels "$HERE"/dist/forerun-*.whl)
for wheel in dist/forerun-*.whl; do
    "$PYTHON" - "$wheel" <<'CHECK'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
wanted = ("forerun/assets/target/", "forerun/assets/heads/", "forerun/server/page/", "forerun/kernels/cpu/", "licenses/")
lacking = [part for part in wanted if not any(part in name for name in names)]
stray = [name for name in names if name.split("/")[0] not in ("forerun",) and ".dist-info/" not in name]
if lacking or stray:
    raise SystemExit(f"release: {sys.argv[1]} lacks {lacking}, and should not have {stray[:5]}")
CHECK
done

say "a fresh environment"
"$PYTHON" -m venv "$WORK/env"
"$WORK/env/bin/python" -m pip install --quiet --disable-pip-version-check $TORCH
for wheel in dist/forerun-*-py3-none-any.whl $(ls dist/forerun-*.whl | grep "manylinux.*_$(uname -m)\.whl"); do
    "$WORK/env/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheel"
    "$WORK/env/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
    "$WORK/env/bin/python" -m pip check --disable-pip-version-check
    mkdir -p "$WORK/elsewhere"
    (
        cd "$WORK/elsewhere" # nothing of the checkout is in reach
        export FORERUN_HOME="$WORK/home-$(basename "$wheel")" HF_HUB_OFFLINE=1
        unset PYTHONPATH
        case $wheel in *-any.whl) ;; *) export PATH="$WORK/empty" CXX= ;; esac # no compiler is in reach
        "$WORK/env/bin/forerun" info >"$WORK/info.txt"
        "$WORK/env/bin/python" - "$WORK/info.txt" "$wheel" <<'CHECK'
import sys
lines = [line for line in open(sys.argv[1]) if line.startswith(("kernels:", "library:"))]
print(*lines, sep="", end="")
if ("prebuilt" in "".join(lines)) == sys.argv[2].endswith("-any.whl"):
    raise SystemExit("release: the wheel's own library is not the one that runs")
CHECK
        "$WORK/env/bin/forerun" demo --json >"$WORK/demo.json" 2>"$WORK/demo.log" || {
            while IFS= read -r line; do say "$line"; done <"$WORK/demo.log" >&2
            exit 1
        }
        "$WORK/env/bin/python" - "$WORK/demo.json" <<'CHECK'
import json, sys
found = json.dumps(json.load(open(sys.argv[1])))
if '"identical": false' in found or '"identical": true' not in found:
    raise SystemExit("release: the demo's texts are not all those of plain decoding")
print("release: the demo's texts are those of plain decoding")
CHECK
    )
done

say "to upload (twine upload, after tagging v$version):"
for file in dist/forerun-*; do
    printf '  %s  %s bytes  sha256 %s\n' "$file" "$(wc -c <"$file" | tr -d ' ')" "$(sha256sum "$file" | cut -d' ' -f1)"
done
