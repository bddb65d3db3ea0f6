"""Logits to laws, and the noise that tokens are drawn with."""

from forerun.sampling.draw import draw_tokens, row_argmax
from forerun.sampling.logprobs import TokenLogprob, token_logprobs
from forerun.sampling.noise import NoiseKey, StepNoise, keyed_gumbel, keyed_uniform
from forerun.sampling.pipeline import LogitsPipeline, LogitsRow

__all__ = [
    "LogitsPipeline",
    "LogitsRow",
    "NoiseKey",
    "StepNoise",
    "TokenLogprob",
    "draw_tokens",
    "keyed_gumbel",
    "keyed_uniform",
    "row_argmax",
    "token_logprobs",
]
