"""forerun's loop inside `model.generate` of Transformers.

    from forerun.integrations.transformers import Speculative

    model.generate(**inputs, max_new_tokens=200, custom_generate=Speculative("suffix"))

Transformers 5 hands the prepared request to such a callable in place of its own loop. forerun computes with a copy of
the model's weights, in its own layout: both stay in memory, which is why `forerun.LLM` is the better choice wherever
the model can be given by name.
"""

from __future__ import annotations

import copy
import logging
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.config import AUTO, NumDraftTokens
from forerun.drafters import Drafter
from forerun.engine import LLM, Generation
from forerun.errors import UnsupportedModelError
from forerun.integrations.generation_options import params_of, prompts_of, refuse_unserved
from forerun.integrations.tried import untried
from forerun.models.loading import adopt
from forerun.models.transformers_model import quietly

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
        generations: of the last call, one a row, with what each of them cost.

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
        other_version = untried("Transformers")
        if other_version is not None:
            _log.warning("forerun: %s", other_version)
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
        """What Transformers calls; see there. Its 5.23 hands over no streamer.

        Returns:
            [B, n] int64, prompts and answers, padded on the right; with `return_dict_in_generate` as `sequences`.

        Raises:
            SamplingError: something is asked for that forerun does not do.
            UnsupportedModelError: the model cannot be served.
            PromptError: a prompt is longer than the model's context.
        """
        refuse_unserved(generation_config, logits_processor, stopping_criteria, model_kwargs)
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
        """Of a copy of the model as it is now."""
        weights = _state(model)
        if self._llm is None or self._model is None or self._model() is not model or self._weights != weights:
            self._llm = None  # its memory goes before the next takes its own
            self._llm = LLM(adopt(_copied(model), str(model.config._name_or_path or "the model")), **self._options)
            self._model, self._weights = weakref.ref(model), weights
        return self._llm


def _copied(model: Any) -> Any:
    """A model with the same weights, which forerun may take apart.

    Raises:
        UnsupportedModelError: its weights are on several devices, quantised by another library, or an adapter's.
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
            f"{kind} is quantised by another library. Load it as it is, and quantise by forerun.LLM(quantize=...)."
        )
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise UnsupportedModelError(f"{kind} has an adapter. Merge it first: model.merge_and_unload().")
    with quietly():
        return copy.deepcopy(model).eval().requires_grad_(False)


def _state(model: Any) -> tuple[object, ...]:
    """What changes when weights are changed: by an optimiser, by loading, by another number format."""
    return tuple(
        (each.data_ptr(), each.dtype, 0 if each.is_inference() else each._version) for each in model.parameters()
    )


def _padding(config: Any) -> int:
    """By which answers are filled up; `generate` takes the first end token where none is named."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    eos = config.eos_token_id
    return int((eos if isinstance(eos, int) else eos[0]) if eos is not None else 0)
