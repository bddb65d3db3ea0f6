"""Speculative decoding by forerun inside `model.generate` of Transformers.

    from forerun.integrations.transformers import Speculative

    model.generate(**inputs, max_new_tokens=200, custom_generate=Speculative("suffix"))

Transformers 5 passes the prepared request to such a callable in place of its own loop. forerun computes with a copy of
the model's weights in its own layout. Both stay in memory, so `forerun.LLM` is the better choice if the model can be
loaded by name.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.config import AUTO, MAX_SEED, NumDraftTokens, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM, Generation
from forerun.errors import SamplingError, UnsupportedModelError
from forerun.integrations.versions import untried
from forerun.models.loading.load import adopt
from forerun.models.loading.transformers_modules import quietly

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
"""Processors whose settings are read from the generation configuration."""
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_UNUSED = {"use_cache", "logits_to_keep", "cache_position", "cache_implementation", "return_dict"}
"""Arguments of a forward without effect here."""
_CACHES = ("past_key_values", "cache")
"""What Transformers calls its cache, before and from version 5.24 on."""
_REMEDY = "Leave it out, or generate without custom_generate."


def _refuse_unsupported(
    generation_config: Any,
    logits_processor: Iterable[Any],
    stopping_criteria: Iterable[Any],
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raise SamplingError for unsupported options of a request."""
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
        if name in _CACHES:
            if value is not None and value.get_seq_length() > 0:
                raise SamplingError(f"{name} holds keys and values, and forerun has its own. {_REMEDY}")
        elif name not in _UNUSED | {"attention_mask", "position_ids"} and value is not None and value is not False:
            raise SamplingError(f"{name} is given to the model, and forerun computes token ids alone. {_REMEDY}")


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> list[list[int]]:
    """Return the prompts without padding.

    Args:
        input_ids: [B, n].
        attention_mask: [B, n], 0 for padding; None: no padding.
        position_ids: [B, n]; None: as they follow from the mask.

    Raises:
        SamplingError: other than left padding, or other positions.
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
    """Return the sampling parameters of each request.

    Args:
        config: of the generation, prepared by `generate`.
        num_prompt: tokens of the longest prompt, which `max_length` includes.
        num_requests: size of the batch. Sampled requests have seeds drawn from PyTorch's generator, so that
            torch.manual_seed decides them.

    Raises:
        SamplingError: a value is out of range.
    """
    ends = _end_tokens(config)
    min_tokens = max(config.min_new_tokens or 0, (config.min_length or 0) - num_prompt, 0)
    common: dict[str, Any] = {
        "max_tokens": config.max_length - num_prompt,
        "min_tokens": min_tokens,
        "stop_token_ids": ends,
        "repetition_penalty": config.repetition_penalty or 1.0,
    }
    if not config.do_sample:
        return [SamplingParams(temperature=0, **common)] * num_requests
    seeds = torch.randint(MAX_SEED, (num_requests,)).tolist()
    drawn: dict[str, Any] = {"top_k": config.top_k or 0, "top_p": config.top_p or 1.0, "min_p": config.min_p or 0.0}
    temperature = 1.0 if config.temperature is None else config.temperature
    return [SamplingParams(temperature=temperature, seed=seed, **drawn, **common) for seed in seeds]


_log = logging.getLogger(__name__)


class Speculative:
    """A `custom_generate` of `model.generate`: greedy or sampled, one prompt or a batch, the same text sooner.

    The model is copied at the first call, and again where its weights have been changed since. One call runs at a time.

    Args:
        drafter: as of `forerun.LLM`.
        num_draft_tokens: K, or "auto".
        tokenizer: the model's, for drafters that need one.
        options: others of `forerun.LLM`.

    Attributes:
        generations: of the last call, one per row, with statistics.

    Raises:
        ConfigError, DrafterError: at the first call, as `forerun.LLM`.
    """

    def __init__(
        self,
        drafter: str | Path | Drafter | None = AUTO,
        num_draft_tokens: NumDraftTokens | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        if (warning := untried("Transformers")) is not None:
            _log.warning("forerun: %s", warning)
        self._options = {**options, "drafter": drafter, "num_draft_tokens": num_draft_tokens, "tokenizer": tokenizer}
        self._llm: LLM | None = None
        self._model: weakref.ref[Any] | None = None
        self._weights: tuple[object, ...] = ()
        self.generations: list[Generation] = []

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate; called by Transformers, which in versions 5.23 and 5.24 passes no streamer.

        Returns:
            [B, n] int64, prompts and answers, padded on the right; with `return_dict_in_generate` as `sequences`.

        Raises:
            SamplingError: an option is not supported.
            UnsupportedModelError: the model cannot be served.
            PromptError: a prompt is longer than the model's context.
        """
        _refuse_unsupported(generation_config, logits_processor, stopping_criteria, model_kwargs)
        prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        params = params_of(generation_config, input_ids.shape[1], len(prompts))
        llm = self._llm_of(model)
        self.generations = llm.generate(prompts, params)
        answers = [each.token_ids for each in self.generations]
        padding = _padding(generation_config)
        longest = max(map(len, answers))
        rows = [answer + [padding] * (longest - len(answer)) for answer in answers]
        sequences = torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    def _llm_of(self, model: Any) -> LLM:
        """Return the engine of a copy of the model with its current weights."""
        weights = _state(model)
        if self._llm is None or self._model is None or self._model() is not model or self._weights != weights:
            self._llm = None  # its memory goes before the next takes its own
            self._llm = LLM(adopt(_copied(model), str(model.config._name_or_path or "the model")), **self._options)
            self._model = weakref.ref(model)
            self._weights = weights
        return self._llm


def _copied(model: Any) -> Any:
    """Copy a model, for conversion into forerun's layout.

    Raises:
        UnsupportedModelError: its weights are on several devices, quantized by another library, or an adapter's.
    """
    kind = type(model).__name__
    is_shared_out = any((getattr(model, name, None) or 1) > 1 for name in ("tp_size", "fsdp_size"))
    is_mapped = len({each.device for each in model.parameters()}) != 1 or getattr(model, "hf_device_map", None)
    if is_shared_out or is_mapped:
        raise UnsupportedModelError(
            f"{kind} lies on several devices, and forerun computes on one. Load it on one, without device_map and "
            "tp_plan, or run vLLM with forerun's drafts (docs/scaling.md)."
        )
    if getattr(model, "is_quantized", False):
        raise UnsupportedModelError(
            f"{kind} is quantized by another library. Load it as it is, and quantize by forerun.LLM(quantize=...)."
        )
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise UnsupportedModelError(f"{kind} has an adapter. Merge it first: model.merge_and_unload().")
    with quietly():
        return copy.deepcopy(model).eval().requires_grad_(False)


def _state(model: Any) -> tuple[object, ...]:
    """Return what changes with the weights: by an optimiser, by loading, by another number format."""
    return tuple(
        (each.data_ptr(), each.dtype, 0 if each.is_inference() else each._version) for each in model.parameters()
    )


def _padding(config: Any) -> int:
    """Return the padding token of answers; the first end token by default, as `generate`."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = _end_tokens(config)
    return int(ends[0]) if ends else 0


def _end_tokens(config: Any) -> list[int]:
    """Return the tokens that end an answer, of which a configuration names none, one or several."""
    ends = config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)
