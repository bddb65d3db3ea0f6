"""The engine: LLM and AsyncLLM, the step loop with its scheduler, and the results of requests."""

from typing import TYPE_CHECKING

from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.results import Choice, Generation, SequenceStats, StepOutput, StepStats, StreamChunk
from forerun.sampling import TokenLogprob
from forerun.utils.deferred import exporting

if TYPE_CHECKING:
    from forerun.engine.async_llm import AsyncLLM
    from forerun.engine.engine_thread import EngineThread

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Engine",
    "EngineThread",
    "Generation",
    "SequenceStats",
    "StepOutput",
    "StepStats",
    "StreamChunk",
    "TokenLogprob",
]

# `LLM` needs neither.
_HOME_OF = {"AsyncLLM": "forerun.engine.async_llm", "EngineThread": "forerun.engine.engine_thread"}
__getattr__ = exporting(__name__, _HOME_OF)
