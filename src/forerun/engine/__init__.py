"""The step loop, and what stands around it: scheduler, budgets, text, statistics, LLM."""

from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.results import Choice, Generation, StepOutput, StreamChunk
from forerun.engine.stats import SequenceStats, StepStats
from forerun.sampling import TokenLogprob

__all__ = [
    "LLM",
    "Choice",
    "Engine",
    "Generation",
    "SequenceStats",
    "StepOutput",
    "StepStats",
    "StreamChunk",
    "TokenLogprob",
]
