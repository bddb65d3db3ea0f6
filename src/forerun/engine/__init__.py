"""The engine: LLM and AsyncLLM, the step loop with its scheduler, and the results of requests."""

from forerun.engine.async_llm import AsyncLLM
from forerun.engine.engine import Engine
from forerun.engine.engine_thread import EngineThread
from forerun.engine.llm import LLM
from forerun.engine.results import Choice, Generation, StepOutput, StreamChunk
from forerun.engine.stats import SequenceStats, StepStats
from forerun.sampling import TokenLogprob

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
