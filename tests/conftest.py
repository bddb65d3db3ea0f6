"""What every test stands on: no network, nothing in the user's cache folder, a tokenizer and a torch of one thread.

One thread, so that pytest-xdist can put a worker on every core; what depends on the number of threads runs again with
two, in `integration/test_two_threads.py`. OMP_NUM_THREADS in the environment overrides it.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from _pytest.mark.expression import Expression

if TYPE_CHECKING:
    from forerun.kernels.cpu.library import Library

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FORERUN_COST_CACHE", "0")
os.environ.setdefault("FORERUN_USERS_HOME", os.environ.get("FORERUN_HOME", ""))  # workers inherit it from the first
_home = tempfile.TemporaryDirectory(prefix="forerun-home-")
os.environ["FORERUN_HOME"] = _home.name  # empty: no test depends on which models are fetched on this machine
_kernels = Path(__file__).parents[1] / "build" / "kernels"
with suppress(OSError):  # kept from run to run and shared by the workers: compiling takes longer than most tests
    _kernels.mkdir(parents=True, exist_ok=True)
    Path(_home.name, "kernels").symlink_to(_kernels)
os.environ["OLLAMA_MODELS"] = str(Path(_home.name, "ollama"))
os.environ["XDG_STATE_HOME"] = str(Path(_home.name, "state"))  # nor chats that were kept here
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Read once, when torch and NumPy are imported; the processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_name, os.environ["OMP_NUM_THREADS"])
# Where a test asks for more threads, those that wait would take the core from the worker beside it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("KMP_BLOCKTIME", "0")


def pytest_sessionstart() -> None:
    """The native library is loaded before any test: none compiles it into a folder of its own. It is for every
    instruction set that this processor has."""
    from forerun.config import KERNELS_VARIABLE, REFERENCE, TRITON
    from forerun.errors import NativeUnavailableError
    from forerun.kernels.cpu import native
    from forerun.kernels.cpu.compiler import library_path

    if os.environ.get(KERNELS_VARIABLE) not in (REFERENCE, TRITON):
        with suppress(NativeUnavailableError):  # then the library is for fewer, or there is none
            library_path(every=True)
    native()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What this makes stays to the end. Half of its time went to garbage collections, which find nothing, and none need
    look at it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Make only the cases that `-m` selects: by default two of three are others.

    Of a test under `sampled(count)`, all but `count` evenly spread cases are marked as slow. Where they begin follows
    from the test's name, so that several tests of the same cases leave out different ones. Where the command line names
    a case, all are made, and none is left out.
    """
    result = yield
    cases = metafunc._calls
    if any("[" in argument for argument in metafunc.config.args):
        return result
    own = {mark.name: mark for mark in metafunc.definition.iter_markers()}
    names = [own.keys() | {mark.name for mark in case.marks} for case in cases]
    if "sampled" in own:
        sampled = [index for index, each in enumerate(names) if "slow" not in each]
        for index in _left_out(metafunc.definition.nodeid, sampled, own["sampled"].args[0]):
            cases[index].marks.append(pytest.mark.slow.mark)
            names[index] = names[index] | {"slow"}
    if chosen := metafunc.config.option.markexpr:
        expression = Expression.compile(chosen)
        kept = [case for case, each in zip(cases, names) if expression.evaluate(each.__contains__)]
        metafunc._calls = kept or cases[:1]  # without any, pytest would make a case without parameters
    return result


def _left_out(name: str, cases: list[int], count: int) -> set[int]:
    """Return those of the cases that are not among `count` evenly spread ones."""
    first = crc32(name.encode())
    return set(cases) - {cases[(first + index * len(cases) // count) % len(cases)] for index in range(count)}


def pytest_report_header() -> str:
    """Which kernels the tests run with: without a compiler, tests of the native ones are skipped."""
    from forerun.kernels.cpu import load_library, native

    library = native()
    if library is not None:
        return f"kernels: native, {library.instructions}"
    chosen = os.environ.get("FORERUN_KERNELS") == "reference"
    return f"kernels: reference only ({'FORERUN_KERNELS says so' if chosen else load_library()})"


@pytest.fixture
def native_library() -> "Library":
    """The native library; the test is skipped where there is none."""
    from forerun.kernels.cpu import native

    library = native()
    if library is None:
        pytest.skip("there are no native kernels: the first lines of this run say why")
    return library


@pytest.fixture
def smollm2_file(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The SmolLM2 file that the user of this machine has fetched; the test is skipped without one."""
    from forerun.utils.fetch import path_of

    with monkeypatch.context() as patch:
        patch.setenv("FORERUN_HOME", os.environ["FORERUN_USERS_HOME"])
        path = path_of("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not fetched: forerun fetch smollm2")
    return path


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are loaded compute by the references in PyTorch, whatever is to be had."""
    monkeypatch.setenv("FORERUN_KERNELS", "reference")


@pytest.fixture
def sigint_handled() -> Iterator[None]:
    """Whatever runs the tests may have SIGINT ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)
