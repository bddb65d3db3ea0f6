"""What `model.generate` was asked for, in forerun's terms; what forerun does not do is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.config import MAX_SEED, SamplingParams
from forerun.errors import SamplingError

_MODES = ("greedy_search", "sample")
_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
}
"""Those whose settings are read from the generation configuration."""
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_UNUSED = {"use_cache", "logits_to_keep", "cache_position", "cache_implementation", "return_dict"}
"""What `generate` hands over for a forward, which forerun computes in its own way."""
_REMEDY = "Leave it out, or generate without custom_generate."


def refuse_unserved(
    generation_config: Any,
    logits_processor: Iterable[Any],
    stopping_criteria: Iterable[Any],
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raises SamplingError for what a request asks for and forerun does not do."""
    mode = str(generation_config.get_generation_mode().value)
    if mode not in _MODES:
        raise SamplingError(f"the generation mode is {mode}, and forerun has {' and '.join(_MODES)}. {_REMEDY}")
    for name in _OUTPUTS:
        if getattr(generation_config, name, None):
            raise SamplingError(f"{name} is set, and forerun returns tokens alone. {_REMEDY}")
    for what, given, served in (
        ("logits processor", logits_processor, _PROCESSORS),
        ("stopping criterion", stopping_criteria, _CRITERIA),
    ):
        for each in given:
            if type(each).__name__ not in served:
                raise SamplingError(f"the {what} {type(each).__name__} is not one that forerun applies. {_REMEDY}")
    for name, value in model_kwargs.items():
        if name == "past_key_values":
            if value is not None and value.get_seq_length() > 0:
                raise SamplingError(f"past_key_values holds keys and values, and forerun has its own. {_REMEDY}")
        elif name not in _UNUSED | {"attention_mask", "position_ids"} and value is not None and value is not False:
            raise SamplingError(f"{name} is given to the model, and forerun computes token ids alone. {_REMEDY}")


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> list[list[int]]:
    """The prompts without padding.

    Args:
        input_ids: [B, n]. attention_mask: the same, 0 where padding is; None: there is none.
        position_ids: the same, of each token; None: as they follow from the mask.

    Raises:
        SamplingError: something else than left padding, or other positions.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape or not bool((mask.diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        raise SamplingError(
            f"attention_mask of shape {list(mask.shape)} masks more than padding on the left. Give "
            "padding_side='left' to the tokenizer."
        )
    if position_ids is not None:
        counted = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if position_ids.shape != counted.shape or not bool((position_ids[mask.bool()] == counted[mask.bool()]).all()):
            raise SamplingError(f"position_ids are not those of the tokens in their order. {_REMEDY}")
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids.cpu(), mask.cpu(), strict=True)]


def params_of(config: Any, num_prompt: int, num_requests: int) -> list[SamplingParams]:
    """The options of each request.

    Args:
        config: of the generation, prepared by `generate`.
        num_prompt: tokens of the longest prompt, by which lengths are counted there.
        num_requests: of the batch. Those that draw have seeds drawn from PyTorch's generator, so that
            torch.manual_seed decides them.

    Raises:
        SamplingError: a value is out of range.
    """
    eos = config.eos_token_id
    min_tokens = max(config.min_new_tokens or 0, (config.min_length or 0) - num_prompt, 0)
    common: dict[str, Any] = {
        "max_tokens": config.max_length - num_prompt,
        "min_tokens": min_tokens,
        "stop_token_ids": [] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        "repetition_penalty": config.repetition_penalty or 1.0,
    }
    if not config.do_sample:
        return [SamplingParams(temperature=0, **common)] * num_requests
    seeds = torch.randint(MAX_SEED, (num_requests,)).tolist()
    drawn: dict[str, Any] = {"top_k": config.top_k or 0, "top_p": config.top_p or 1.0, "min_p": config.min_p or 0.0}
    temperature = 1.0 if config.temperature is None else config.temperature
    return [SamplingParams(temperature=temperature, seed=seed, **drawn, **common) for seed in seeds]
