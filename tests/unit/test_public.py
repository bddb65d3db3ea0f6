"""The public names: sorted, complete, and changed on purpose only."""

import subprocess
import sys

import pytest

import forerun
from forerun.drafters import DRAFTERS

FIXED = [
    "LLM",
    "AsyncLLM",
    "BatchError",
    "Choice",
    "ConfigError",
    "Draft",
    "Drafter",
    "DrafterError",
    "EngineClosedError",
    "FetchError",
    "ForerunError",
    "Generation",
    "Grammar",
    "GrammarDeadEndError",
    "GrammarError",
    "IncompatibleDrafterError",
    "InterruptedRequestError",
    "ModelLoadError",
    "NonFiniteError",
    "PromptError",
    "RequestError",
    "SamplingError",
    "SamplingParams",
    "Sequence",
    "SequenceStats",
    "Step",
    "StreamChunk",
    "UnsupportedModelError",
    "Verdict",
    "__version__",
]


def isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order ruff gives to `__all__`."""
    if name.isupper():
        return 0, name
    return (1, name) if name[:1].isupper() else (2, name)


PUBLIC = sorted([*FIXED, *(row.class_name for row in DRAFTERS.values())], key=isort_key)


def test_all_is_pinned_and_sorted() -> None:
    assert forerun.__all__ == PUBLIC
    assert sorted(FIXED, key=isort_key) == FIXED
    assert len(set(PUBLIC)) == len(FIXED) + len(DRAFTERS)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name: str) -> None:
    assert getattr(forerun, name) is not None
    assert name in dir(forerun)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        forerun.no_such_name  # noqa: B018


def test_importing_the_command_line_does_not_load_torch() -> None:
    loaded = "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    code = f"import sys, forerun.cli.main, forerun.drafters.registry; {loaded}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
