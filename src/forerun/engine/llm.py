"""LLM, the synchronous interface: a target model, a drafter, and generated text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import nn

from forerun.config import (
    AUTO,
    DEFAULT_DTYPE,
    MAX_BATCH,
    MEMORY_LOG,
    OFF,
    PREFILL_CHUNK,
    EngineConfig,
    NumDraftTokens,
    SamplingParams,
    check_one_process,
)
from forerun.drafters import Binding, Drafter, check_drafter_text, chosen_drafter, make_drafter
from forerun.engine.chat_template import Prompt, encode, split_prompts
from forerun.engine.engine import Engine
from forerun.engine.memory_plan import MemoryPlan
from forerun.engine.request_checks import naming_prompt
from forerun.engine.results import Generation, StepOutput, StreamChunk
from forerun.engine.sequence import Request
from forerun.engine.step_times import calibrate
from forerun.engine.thread_safe import SharedEngine
from forerun.errors import BatchError, ConfigError, DrafterError, ModelLoadError, PromptError
from forerun.models import LanguageModel, find_tokenizer, load_model
from forerun.speculation.cost_store import read_start

_log = logging.getLogger(MEMORY_LOG)
Drafters = str | Path | Drafter | Sequence[str | Path | Drafter] | None


def open_target(
    target: str | Path | LanguageModel,
    drafter: Drafters,
    config: EngineConfig,
    tokenizer: Any,
    *,
    dtype: str,
    device: str,
    adapter: str | Path | None,
    quantize: str | None,
) -> tuple[LanguageModel, Any]:
    """Return the target model and its tokenizer: the given one, else the one beside the model.

    Raises:
        ConfigError, ModelLoadError, NotEnoughMemoryError: as `LLM`.
    """
    if isinstance(target, nn.Module):
        raise ConfigError(
            f"the target is a {type(target).__name__} of another library's in memory. Give its name or folder, or "
            "generate with it: custom_generate=forerun.integrations.transformers.Speculative()."
        )
    if not isinstance(target, (str, Path)):
        if adapter is not None:
            raise ConfigError(
                f"adapter is {str(adapter)!r}, but the target is a loaded model, and an adapter is merged before a "
                "model is. Give the target's name, or load it with its adapter."
            )
        if quantize is not None:
            raise ConfigError(
                f"quantize is {quantize!r}, but the target is a loaded model, and weights are quantized as they are "
                "read. Give the target's name, or load it with quantize."
            )
        return target, tokenizer
    with suppress(ConfigError, ModelLoadError, DrafterError):  # loading reports everything else that is wrong
        plan = MemoryPlan.of(target, drafter, config, dtype=dtype, device=device, adapter=adapter, quantize=quantize)
        _log.info("%s", plan)
    model = load_model(target, dtype, device=device, adapter=adapter, quantize=quantize)
    return model, tokenizer or find_tokenizer(target, adapter)


_DRAFTER_SEED = 0x6A09E667F3BCC908
"""Keeps the drafter's draws apart from the engine's: rejection is exact only if the two are independent."""


class LLM:
    """Generates text with a target model, faster with a drafter, and with the same distribution either way.

    Any number of threads may call `generate` and `stream` at once: their requests are computed together, up to
    `max_batch`, and one of the waiting threads steps for all. The iterator of a stream belongs to one thread at a time.

    Ctrl-C is handled at the end of a step. The call that it interrupts ends its own requests; other requests continue.

    Args:
        target: "bundled", a folder, a hub id, or a loaded Model.
        drafter: "auto" (the fastest, as measured, that needs no option: the bundled draft model for the bundled target,
            else suffix matches), None or "none" (plain decoding), a name, perhaps with options (`forerun drafters`
            lists them), the folder or id of a draft model, or a drafter object such as DraftModel(path). A list of
            drafters: each request has the one that it names (`SamplingParams.drafter`), else the first, or for a
            prediction the first that reads predictions.
        dtype: of the weights: "bfloat16", "float32" or "float64".
        device: where target and draft model compute: "cpu", "cuda", "cuda:1" or "mps".
        num_draft_tokens: K, at most this many tokens are drafted in a step; 0 is plain decoding; "auto" chooses for
            every sequence and step what is fastest, by measured acceptance and costs. None takes the one in the
            drafter's text ("suffix:num_draft_tokens=4"), or "auto".
        acceptance: name of a verification rule; None takes the lossless one that fits each request.
        seed: of the noise for requests that carry no seed; None draws one.
        max_batch: sequences computed together; more wait their turn.
        prefill_chunk: prompt tokens a sequence computes in one step.
        cache_memory: GiB for the target's keys and values. A request that could never fit is refused, one that does not
            fit now waits. None: what max_batch sequences of the whole context need, at most half of the machine's
            memory and what is left beside the weights; it is taken when it is needed.
        prefix_reuse: "on" keeps keys and values of prompts and answers for requests that begin alike, while memory
            suffices; "off" keeps none; "auto" does where the model is exact, so that it changes no bit.
        tokenizer: replaces the one beside the target.
        adapter: the folder of a PEFT LoRA adapter, merged into the target when it is loaded (extra `peft`). A tokenizer
            beside it replaces the target's, whose tokens it must have.
        start: a file of costs and acceptance that `forerun tune` has written, with which an automatic K begins.
        quantize: "int8" or "int4", what the target's weights are kept in; `dtype` is the number format of everything
            else. None: as its files say. A draft model has an option of its own ("draft-model:quantize=int4").
        tensor_parallel_size: 1, as vLLM's programs say it: a model is computed in one process (docs/scaling.md).

    Attributes:
        drafter_name: the drafter as text: what "auto" has chosen, too; of an object its class. None is plain decoding.
        shared: the engine for any number of threads, for an `EngineThread` beside the threads that call this.

    Raises:
        ConfigError: an option is out of range, the device is not there, a loaded Model is to get an adapter or to be
            quantized, or several processes are requested.
        ModelLoadError: a model or an adapter cannot be read, or they do not fit.
        DrafterError: the drafter is unknown, or does not fit the target.
        NotEnoughMemoryError: before any weights are read, that they, with the keys and values of one sequence or with
            `cache_memory`, do not fit into the memory that is available.
    """

    def __init__(
        self,
        target: str | Path | LanguageModel = "bundled",
        drafter: str | Path | Drafter | Seq[str | Path | Drafter] | None = AUTO,
        *,
        dtype: str = DEFAULT_DTYPE,
        device: str = "cpu",
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        seed: int | None = None,
        max_batch: int = MAX_BATCH,
        prefill_chunk: int = PREFILL_CHUNK,
        cache_memory: float | None = None,
        prefix_reuse: str = AUTO,
        tokenizer: Any = None,
        adapter: str | Path | None = None,
        quantize: str | None = None,
        start: str | Path | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        check_one_process(tensor_parallel_size)
        config = EngineConfig(
            prefill_chunk=prefill_chunk,
            max_batch=max_batch,
            cache_memory=cache_memory,
            prefix_reuse=prefix_reuse,
            acceptance=acceptance,
            seed=seed,
            num_draft_tokens=AUTO if num_draft_tokens is None else num_draft_tokens,
        )
        if start is not None:
            read_start(Path(start))
        check_drafter_text(drafter, target)
        self.target, self.tokenizer = open_target(
            target, drafter, config, tokenizer, dtype=dtype, device=device, adapter=adapter, quantize=quantize
        )
        drafter_seed = None if seed is None else seed ^ _DRAFTER_SEED
        binding = Binding(self.target, self.tokenizer, drafter_seed, prefix_reuse != OFF)
        self.drafter: Drafter | None = None
        chosen = chosen_drafter(drafter, self.target)
        self.drafter_name: str | None = None
        if chosen is not None:
            self.drafter_name = str(chosen) if isinstance(chosen, (str, Path)) else type(chosen).__name__
            self.drafter, written = make_drafter(chosen, binding)
            if num_draft_tokens is None and written is not None:
                config = replace(config, num_draft_tokens=written)
        if self.drafter is not None and config.num_draft_tokens == AUTO:
            calibrate(self.target)
        self.engine = Engine(self.target, self.drafter, tokenizer=self.tokenizer, config=config)
        self.shared = SharedEngine(self.engine)

    def close(self) -> None:
        """Discard requests that are not finished."""
        self.engine.close()

    @property
    def exact(self) -> bool:
        """Return whether plain and speculative runs give bit-identical logits; if not, `target.exactness` has the
        reason."""
        return self.target.exactness.exact

    @property
    def num_draft_tokens(self) -> NumDraftTokens:
        """Return K, the number of draft tokens of every step, or "auto"."""
        return self.engine.config.num_draft_tokens

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Generation: ...
    @overload
    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Any: ...  # a single prompt of token ids has the type of a list of prompts
    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Generation | list[Generation]:
        """Answer one prompt or several together.

        Args:
            prompts: text, token ids, or a chat (a list of messages); or a list of these.
            params: for all prompts, or one per prompt.

        Returns:
            A Generation for a single prompt, else a list of them in the order of the prompts.

        Raises:
            PromptError, SamplingError: before anything is computed, if one of the requests cannot be served.
            BatchError: some of several requests failed while they were computed; it holds the other answers. For a
                single prompt, the error itself.
        """
        split, single = split_prompts(prompts)
        requests = self.requests(split, params)
        ids: list[int] = []
        results: list[Generation | Exception] = []
        try:
            for request in requests:
                self.shared.add(request, ids)
            results += map(self._collect, requests)
        finally:
            self.shared.forget(ids)
        errors = {index: result for index, result in enumerate(results) if isinstance(result, Exception)}
        generations = [result if isinstance(result, Generation) else None for result in results]
        if errors:
            first = next(iter(errors.values()))
            if single:
                raise first
            raise BatchError(generations, errors) from first
        done = [generation for generation in generations if generation is not None]
        return done[0] if single else done

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Answer one prompt, step by step. Closing the iterator ends the request.

        Raises:
            PromptError, SamplingError: at once, not at the first chunk.
        """
        (request,) = self.engine.requests([self.encode(prompt)], params, stream=True)
        return self._chunks(request)

    def requests(self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None) -> list[Request]:
        """Make a request of each prompt; params as of `generate`. Any thread may call this, at any time.

        Raises:
            PromptError, SamplingError: one of the requests cannot be served.
        """
        encoded = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                encoded.append(encode(prompt, self.tokenizer, self.target.name))
        if params is None or isinstance(params, SamplingParams):
            return self.engine.requests(encoded, params)
        made = []
        for index, (prompt, each) in enumerate(zip(encoded, one_each(params, len(encoded)), strict=True)):
            with naming_prompt(index, len(encoded)):
                made += self.engine.requests([prompt], each)
        return made

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode one prompt as `generate` and `stream` do.

        Raises:
            PromptError: it cannot be read, or there are several.
        """
        split, single = split_prompts(prompt)
        if not single:
            raise PromptError(f"This takes one prompt, but got a list of {len(split)}. Use generate for several.")
        return encode(split[0], self.tokenizer, self.target.name)

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        # The request enters with the first chunk: an iterator that is never started leaves nothing behind.
        ids: list[int] = []
        try:
            self.shared.add(request, ids)
            unfinished = request.params.n
            while unfinished:
                for output in self.shared.take(request.id):
                    if output.error is not None:
                        raise output.error
                    unfinished -= output.choice is not None
                    yield output.chunk
        finally:
            self.shared.forget(ids)

    def _collect(self, request: Request) -> Generation | Exception:
        """Wait for the answer to one request. Return it, or the error of the choice that failed first."""
        outputs: list[StepOutput] = []
        while len(outputs) < request.params.n:
            for output in self.shared.take(request.id):
                if output.error is not None:
                    self.shared.forget([request.id])
                    return output.error
                outputs.append(output)
        return Generation.of(request.prompt_token_ids, outputs)


def one_each(params: Seq[SamplingParams], count: int) -> Seq[SamplingParams]:
    """Return the options of each of `count` prompts. Raises ConfigError if there are more or fewer."""
    if len(params) != count:
        raise ConfigError(f"There are {count} prompts but {len(params)} params. Give one for all, or one per prompt.")
    return params
