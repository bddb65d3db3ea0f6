"""LLM, the synchronous interface: a target model, a drafter, and generated text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

import torch
from tqdm import tqdm

from forerun.chat.infill import Infill, InfillFormat
from forerun.config import (
    AUTO,
    DEFAULT_DTYPE,
    MAX_BATCH,
    MEMORY_LOG,
    OFF,
    PREFILL_CHUNK,
    REMEMBER_SIZE,
    AdaptOptions,
    EngineConfig,
    MaxModelLen,
    NumDraftTokens,
    SamplingParams,
    check_one_process,
)
from forerun.drafters import Binding, Drafter
from forerun.drafters.build import Drafters
from forerun.engine.adapting import Adapting, new_adapting
from forerun.engine.chat_template import (
    Message,
    Prompt,
    encode,
    one_prompt,
    split_chats,
    split_prompts,
    template_of,
    with_template,
)
from forerun.engine.engine import Engine
from forerun.engine.kv_cache_manager import bound_memory
from forerun.engine.opening import Chosen, bound_drafter, check_counts, drafter_of, open_target
from forerun.engine.request_checks import Params, check_text, excess_characters, naming_prompt, one_each, sampling_of
from forerun.engine.results import Generation, StepOutput, StreamChunk
from forerun.engine.sequence import Request
from forerun.engine.step_times import calibrate, check_costs
from forerun.engine.thread_safe import SharedEngine
from forerun.errors import (
    BatchError,
    ConfigError,
    ContextLengthError,
    PromptError,
)
from forerun.models import LanguageModel, number_format
from forerun.utils.fields import described
from forerun.utils.files import Closing
from forerun.utils.habits import ON_GPUS, Hinted, translated
from forerun.utils.machine import MIB

if TYPE_CHECKING:
    from forerun.drafters.lookup.remembered.remembered_text import RememberedText

_log = logging.getLogger(MEMORY_LOG)
Bar: TypeAlias = bool | Callable[..., Any]


_DRAFTER_SEED = 0x6A09E667F3BCC908
"""Keeps the drafter's draws apart from the engine's: rejection is exact only if the two are independent."""


class LLM(Closing, Hinted):
    """Generates text with a target model, faster with a drafter, and with the same distribution either way.

    Any number of threads may call `generate` and `stream` at once: their requests are computed together, up to
    `max_batch`, and one of the waiting threads steps for all. The iterator of a stream belongs to one thread at a time.

    Ctrl-C is handled at the end of a step. The call that it interrupts ends its own requests; other requests continue.

    Args:
        model: the target: "bundled", a folder, a hub id, or a loaded Model.
        drafter: "auto" (the bundled draft model for the bundled target, else suffix matches, in a hybrid with the best
            draft model or head for the target that lies on this machine), None or "none" (plain decoding), a name,
            perhaps with options (`forerun drafters` lists them), the folder or id of a draft model, or a drafter object
            such as DraftModel(path). A list of drafters: each request has the one that it names
            (`SamplingParams.drafter`), else the first, or for a prediction the first that reads predictions.
        dtype: of the weights: "bfloat16", "float32", "float64" or "auto", or PyTorch's dtype of such a name.
        device: where target and draft model compute: "cpu", "cuda", "cuda:1" or "mps".
        num_draft_tokens: K, at most this many tokens are drafted in a step; 0 is plain decoding; "auto" chooses for
            every sequence and step what is fastest, by measured acceptance and costs. None takes the one in the
            drafter's text ("suffix:num_draft_tokens=4"), or "auto".
        acceptance: name of a verification rule; None takes the lossless one that fits each request.
        seed: of the noise for requests that carry no seed; None draws one.
        max_batch: sequences computed together; more wait their turn.
        prefill_chunk: prompt tokens a sequence computes in one step.
        cache_memory: GiB for the target's keys and values. A request that does not fit now waits. None: what max_batch
            sequences of the whole context need, at most half of the machine's memory and what is left beside the
            weights; it is taken when it is needed.
        prefix_reuse: "on" keeps keys and values of prompts and answers for requests that begin alike, while memory
            suffices; "off" keeps none; "auto" does where the model is exact, so that it changes no bit.
        prompt_cache: a folder of your own, in which these keys and values outlast this process; None: none does. Its
            files stay when the prefix cache is reset. prompt_cache_size: GiB that they may take; None: 8.
        remember: a file of your own in which answers outlast this process, as token ids: suffix matches copy from those
            of the request's tenant. remember_size: MiB that it takes; None: as it is, 16 at first.
        tokenizer: replaces the one beside the target; or the folder or id that it is beside.
        chat_template: a chat template in place of the model's: its text, or the path of its file.
        adapter: the folder of a PEFT LoRA adapter, merged into the target when it is loaded (extra `peft`). A tokenizer
            beside it replaces the target's, whose tokens it must have.
        quantize: "int8" or "int4", what the target's weights are kept in; `dtype` is the number format of everything
            else. None: as its files say. A draft model has an option of its own ("draft-model:quantize=int4").
        quantization: the same, by vLLM's name.
        kv_cache_dtype: "bfloat16", "float32" or "int8", what the native kernels store keys and values in; "auto":
            `dtype`. "int8" takes half the memory of bfloat16. Draft models and heads keep their own in `dtype`.
        max_model_len: tokens that a prompt and its answer may have together. Longer prompts are refused, answers end
            there, and the cache is planned for it. "auto" or None: the model's context, or what one request may have
            of it where `cache_memory` holds less.
        threads: of torch, in this process; None leaves their number.
        speculative_config: the drafter as vLLM's dictionary, such as {"method": "ngram", "num_speculative_tokens": 4}.
        adapt: let the drafter, an EAGLE head or a draft model, go on learning from what is generated, while nothing is
            (docs/serving.md); True, or its options. The text does not depend on it.
        tensor_parallel_size: 1, as vLLM's programs say it: a model is computed in one process (docs/scaling.md).
        others: options of vLLM's that change nothing here (docs/coming-from.md).

    Attributes:
        drafter_name: the drafter as text: what "auto" has chosen, too; of an object its class. None is plain decoding.
        shared: the engine for any number of threads, for an `EngineThread` beside the threads that call this.
        adapting: the drafter's learning, with `progress()` and `save(folder)`; None without `adapt`.

    Raises:
        ConfigError: an option is unknown or out of range, the device is not there, a loaded Model is to get an adapter
            or to be quantized, two options contradict each other, or several processes are requested.
        ModelLoadError: a model or an adapter cannot be read, or they do not fit.
        DrafterError: the drafter is unknown, or does not fit the target.
        NotEnoughMemoryError: before any weights are read, that they, with the keys and values of one sequence or with
            `cache_memory`, do not fit into the memory that is available, or `max_model_len` tokens not into the cache.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel = "bundled",
        drafter: str | Path | Drafter | Seq[str | Path | Drafter] | None = AUTO,
        *,
        dtype: str | torch.dtype = DEFAULT_DTYPE,
        device: str = "cpu",
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        seed: int | None = None,
        max_batch: int = MAX_BATCH,
        prefill_chunk: int = PREFILL_CHUNK,
        cache_memory: float | None = None,
        prefix_reuse: str = AUTO,
        prompt_cache: str | Path | None = None,
        prompt_cache_size: float | None = None,
        remember: str | Path | None = None,
        remember_size: float | None = None,
        tokenizer: Any = None,
        chat_template: str | Path | None = None,
        adapter: str | Path | None = None,
        quantize: str | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str = AUTO,
        max_model_len: MaxModelLen | None = AUTO,
        threads: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        adapt: bool | AdaptOptions = False,
        tensor_parallel_size: int = 1,
        **others: Any,
    ) -> None:
        _check_others(others, device, tensor_parallel_size)
        max_model_len = AUTO if max_model_len is None else max_model_len
        check_counts(threads, max_model_len, quantize, quantization)
        drafter = drafter_of(model, drafter, speculative_config, num_draft_tokens)
        config = EngineConfig(
            prefill_chunk=prefill_chunk,
            max_batch=max_batch,
            cache_memory=cache_memory,
            prefix_reuse=prefix_reuse,
            prompt_cache=None if prompt_cache is None else str(prompt_cache),
            prompt_cache_size=prompt_cache_size,
            remember=None if remember is None else str(remember),
            remember_size=remember_size,
            acceptance=acceptance,
            seed=seed,
            num_draft_tokens=AUTO if num_draft_tokens is None else num_draft_tokens,
        )
        self.target, self.tokenizer, chosen = open_target(
            *(model, drafter, config, tokenizer),
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            adapter=adapter,
            quantize=quantize or quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
        )
        if chat_template is not None:
            self.tokenizer = with_template(self.tokenizer, chat_template)
        adapt = AdaptOptions(adapt=adapt) if isinstance(adapt, bool) else adapt
        self._add_drafter(chosen, drafter, config, max_model_len, num_draft_tokens is None, adapt)

    def _add_drafter(
        self,
        chosen: Chosen,
        given: Drafters,
        config: EngineConfig,
        max_model_len: MaxModelLen,
        takes_written: bool,
        adapt: AdaptOptions,
    ) -> None:
        """Make the drafter and the engine. given: what `chosen` was made of. takes_written: a K that the drafter's text
        has is the engine's."""
        with ExitStack() as opening:
            remembered: RememberedText | None = None
            if config.remember is not None:
                remembered = opening.enter_context(self._open_remembered(config.remember, config.remember_size))
            config = self._bind_drafter(chosen, given, config, takes_written, remembered)
            bound_memory(self.target, self.drafter, config, max_model_len)
            if reason := self.target.context_reason:
                _log.info("contexts up to %s tokens: %s", f"{self.target.context_length:,}", reason)
            if self.drafter is not None and config.num_draft_tokens == AUTO:
                calibrate(self.target, self.drafter)
            if remembered is not None:
                remembered.start()  # beside nothing that is measured, memory or time
            self.adapting: Adapting | None = None
            if adapt.adapt:
                self.adapting = new_adapting(self.drafter, adapt, self._has_work)
                opening.callback(self.adapting.close)
            self.engine = Engine(
                self.target,
                self.drafter,
                tokenizer=self.tokenizer,
                config=config,
                bounds_memory=False,
                remembered=remembered,
            )
            if self.adapting is not None:
                self.adapting.start()
            opening.pop_all()
        self.shared = SharedEngine(self.engine)

    def _open_remembered(self, file: str, mib: float | None) -> RememberedText:
        """Open the file of answers. mib: as `remember_size`. Raises ConfigError as `RememberedText`."""
        from forerun.drafters.lookup.remembered.remembered_text import RememberedText
        from forerun.utils.vocabulary import fingerprint

        size = None if mib is None else int(mib * MIB)
        return RememberedText(
            Path(file),
            size,
            self.target.vocab_size,
            fingerprint(self.tokenizer),
            default_bytes=int(REMEMBER_SIZE * MIB),
        )

    def _bind_drafter(
        self,
        chosen: Chosen,
        given: Drafters,
        config: EngineConfig,
        takes_written: bool,
        remembered: RememberedText | None,
    ) -> EngineConfig:
        """Make the drafter and bind it to the target. Returns the options with the K that its text has, if any."""
        self.drafter: Drafter | None = None
        self.drafter_name: str | None = None
        if chosen is not None:
            if config.num_draft_tokens == AUTO:
                check_costs(self.target)
            own_seed = None if config.seed is None else config.seed ^ _DRAFTER_SEED
            binding = Binding(self.target, self.tokenizer, own_seed, config.prefix_reuse != OFF, remembered)
            chosen, self.drafter, written = bound_drafter(chosen, given, binding)
            self.drafter_name = str(chosen) if isinstance(chosen, (str, Path)) else type(chosen).__name__
            if takes_written and written is not None:
                config = replace(config, num_draft_tokens=written)
        return config

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Self:
        """Make an LLM, as Transformers' programs say it."""
        return cls(model, **options)

    def __repr__(self) -> str:
        """Show the model, the format of its weights, the drafter, and whether it is exact, in one line."""
        exact = "exact" if self.exact else "not exact"
        return f"LLM({self.target.name!r}, {number_format(self.target)}, drafter={self.drafter_name!r}, {exact})"

    def get_tokenizer(self) -> Any:
        """Return the Transformers tokenizer; None if the model has none."""
        return getattr(self.tokenizer, "full", self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the options that the target's files recommend. `generate` takes them only if it is given them."""
        own: dict[str, Any] = {**getattr(self.target, "recommended_sampling", {})}
        return SamplingParams(**own | {"top_k": int(own.get("top_k", 0))})

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values that are kept for requests that begin alike, of the drafter's models too. Return
        whether none is left; requests that are not finished keep theirs."""
        pools = (self.target.pool, *(() if self.drafter is None else self.drafter.pools))
        emptied = [pool.forget() for pool in pools if pool is not None]
        return all(emptied)

    def close(self) -> None:
        """Discard requests that are not finished, stop learning, and close the file of `remember`."""
        if self.adapting is not None:
            self.adapting.close()
        self.engine.close()

    def _has_work(self) -> bool:
        return self.engine.has_work

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
    def generate(
        self, prompts: str, sampling_params: Params | None = None, *, use_tqdm: Bar = True, **sampling: Any
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Seq[Prompt] = (),
        sampling_params: Params | Seq[Params] | None = None,
        *,
        use_tqdm: Bar = True,
        **sampling: Any,
    ) -> Any: ...  # a single prompt of token ids has the type of a list of prompts
    def generate(
        self,
        prompts: Prompt | Seq[Prompt] = (),
        sampling_params: Params | Seq[Params] | None = None,
        *,
        use_tqdm: Bar = True,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Answer one prompt or several together.

        Args:
            prompts: text, token ids, or a chat (a list of messages); {"prompt": text} or {"prompt_token_ids": ids}; or
                a list of these.
            sampling_params: for all prompts, or one per prompt.
            use_tqdm: show a bar on a terminal while several prompts are answered. Or what makes the bar, as tqdm does.
            sampling: options of SamplingParams, in place of those of `sampling_params`.

        Returns:
            A Generation for a single prompt, else a list of them in the order of the prompts.

        Raises:
            PromptError, SamplingError: before anything is computed, if one of the requests cannot be served.
            BatchError: some of several requests failed while they were computed; it holds the other answers. For a
                single prompt, the error itself.
        """
        params = sampling_of(sampling_params, sampling)
        split, single = split_prompts(prompts)
        return self._answers(self.requests(split, params), single, use_tqdm)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: Params | Seq[Params] | None = None,
        *,
        use_tqdm: Bar = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer a chat or several together, like `generate`.

        Args:
            messages: a list of messages with "role" and "content", or a list of such chats.
            chat_template_kwargs: what the chat template is given beside the messages.
            options: `chat_template`, `tools` and others of TEMPLATE_OPTIONS, which it is given too, and options of
                SamplingParams.
        """
        template, sampling = template_of(chat_template_kwargs, options)
        params = sampling_of(sampling_params, sampling)
        split, single = split_chats(messages)
        return self._answers(self.requests(split, params, template), single, use_tqdm)

    def infill(
        self,
        prefix: str,
        suffix: str,
        extra: Seq[tuple[str, str]] = (),
        sampling_params: Params | None = None,
        **sampling: Any,
    ) -> Generation:
        """Write what stands between two texts, as an editor's completion at the cursor.

        Args:
            extra: (name, text) of other files, the oldest first. Those that the context has no room for are left out,
                the oldest first; a warning of the answer says so.
            sampling_params, sampling: as of `generate`.

        Raises:
            PromptError, SamplingError: as `generate`; or the model has no tokens that fill in the middle.
        """
        return self.generate(Infill(prefix, suffix, extra), sampling_params, **sampling)  # type: ignore[no-any-return]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[StreamChunk]:
        """Answer one prompt, step by step. Closing the iterator ends the request. Arguments as of `generate` or, for a
        chat, of `chat`.

        Raises:
            PromptError, SamplingError: at once, not at the first chunk.
        """
        template, sampling = template_of(chat_template_kwargs, options)
        params = sampling_of(sampling_params, sampling)
        (request,) = self.requests([one_prompt(prompt)], params, template, stream=True)
        return self._chunks(request)

    def requests(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams | None] | None,
        template_options: Mapping[str, Any] = MappingProxyType({}),
        *,
        stream: bool = False,
        flow: Hashable = None,
    ) -> list[Request]:
        """Make a request of each prompt. Any thread may call this, at any time.

        Args:
            prompts: as `split_prompts` returns them.
            params: as `sampling_of` returns them.
            template_options: what a chat's template is given beside the messages.
            stream: as of `Engine.requests`.
            flow: as of `Engine.requests`.

        Raises:
            PromptError, SamplingError: one of the requests cannot be served.
        """
        if any(isinstance(prompt, Infill) for prompt in prompts):
            return self._with_infills(prompts, params, template_options, stream=stream, flow=flow)
        encoded = []
        target = self.target
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                encoded.append(encode(prompt, self.tokenizer, target.name, template_options, model=target))
        if params is None or isinstance(params, SamplingParams):
            made = self.engine.requests(encoded, params, stream=stream, flow=flow)
        else:
            made = []
            for index, (ids, each) in enumerate(zip(encoded, one_each(params, len(encoded)), strict=True)):
                with naming_prompt(index, len(encoded)):
                    made += self.engine.requests([ids], each, stream=stream, flow=flow)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return [replace(request, prompt=text) for request, text in zip(made, texts, strict=True)]

    def _with_infills(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams | None] | None,
        template_options: Mapping[str, Any],
        **options: Any,
    ) -> list[Request]:
        """Make requests as `requests`, of prompts some of which fill in the middle."""
        several = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        made = []
        for index, (prompt, each) in enumerate(zip(prompts, one_each(several, len(prompts)), strict=True)):
            with naming_prompt(index, len(prompts)):
                if not isinstance(prompt, Infill):
                    made += self.requests([prompt], each, template_options, **options)
                    continue
                params = each or SamplingParams()
                ids, num_left_out = self._encoded_infill(prompt, params)
                ends = () if params.ignore_eos else self.infill_format.ends
                stops = (*params.stop_token_ids, *ends)
                (request,) = self.engine.requests([ids], replace(params, stop_token_ids=stops), **options)
                own = {stop: reason for stop, reason in request.stop_reasons.items() if reason not in ends}
                made.append(replace(request, stop_reasons=own, num_left_out=num_left_out))
        return made

    @cached_property
    def infill_format(self) -> InfillFormat:
        """Return how the target reads prompts of `Infill`. Raises PromptError if it reads none."""
        target = self.target
        names = (target.name, target.loaded_by, getattr(target, "published_name", ""))
        return InfillFormat.of(self.tokenizer, [str(name) for name in names])

    def _encoded_infill(self, prompt: Infill, params: SamplingParams) -> tuple[list[int], int]:
        """Return the tokens of a prompt, and the number of extra files that the context has no room for."""
        target = self.target
        for text in (prompt.prefix, prompt.suffix, *(part for file in prompt.extra for part in file)):
            check_text(text, PromptError, "The text")
        reads = self.infill_format
        if excess := excess_characters(prompt.prefix + prompt.suffix, self.tokenizer, target, says_why=True):
            raise ContextLengthError(f"The text around the cursor has {excess}. Shorten it.")
        most = target.context_length
        return reads.encode(prompt, self.tokenizer, most - min(params.max_tokens, most // 4))

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode one prompt as `generate` and `stream` do.

        Raises:
            PromptError: it cannot be read, or there are several.
        """
        one = one_prompt(prompt)
        if isinstance(one, Infill):
            return self._encoded_infill(one, SamplingParams())[0]
        return encode(one, self.tokenizer, self.target.name)

    def _answers(self, requests: Seq[Request], single: bool, use_tqdm: Bar) -> Generation | list[Generation]:
        """Compute requests together. Returns and raises as `generate`."""
        ids: list[int] = []
        results: list[Generation | Exception] = []
        try:
            for request in requests:
                self.shared.add(request, ids)
            results += map(self._collect, requests if single else with_bar(requests, use_tqdm))
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
                    request.check(output)
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
                request.check(output)
                outputs.append(output)
        return Generation.of(request.prompt_token_ids, outputs, request.prompt)


def with_bar(requests: Seq[Request], use_tqdm: Bar) -> Iterable[Request]:
    """Return the requests; on a terminal, a bar counts them as they are taken."""
    if callable(use_tqdm):
        return use_tqdm(requests, desc="prompts")  # type: ignore[no-any-return]
    return tqdm(requests, desc="prompts", leave=False) if use_tqdm and sys.stderr.isatty() else requests


def _check_others(others: Mapping[str, Any], device: str, tensor_parallel_size: int) -> None:
    """Raise ConfigError for options that `LLM` does not have, unless they change nothing, and for several processes."""
    asked = {name: value for name, value in others.items() if name not in ON_GPUS or str(device).startswith("cuda")}
    if asked:
        known = [name for name in signature(LLM).parameters if name not in ("tensor_parallel_size", "others")]
        translated(asked, known, ConfigError, "LLM", {"SamplingParams": described(SamplingParams)})
    check_one_process(tensor_parallel_size)
