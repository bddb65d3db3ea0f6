"""The processing of logits to distributions, and the noise that tokens are drawn with."""

from forerun.sampling.draw import TokenLogprob, draw_tokens, non_finite_rows, row_argmax, row_top, token_logprobs
from forerun.sampling.filters import filters_only, unfiltered
from forerun.sampling.grammar import DeadRows, SequenceConstraint
from forerun.sampling.noise import NoiseKey, StepNoise, keyed_gumbel, keyed_uniform
from forerun.sampling.pipeline import LogitsPipeline, LogitsRow, takes_argmax

__all__ = [
    "DeadRows",
    "LogitsPipeline",
    "LogitsRow",
    "NoiseKey",
    "SequenceConstraint",
    "StepNoise",
    "TokenLogprob",
    "draw_tokens",
    "filters_only",
    "keyed_gumbel",
    "keyed_uniform",
    "non_finite_rows",
    "row_argmax",
    "row_top",
    "takes_argmax",
    "token_logprobs",
    "unfiltered",
]
