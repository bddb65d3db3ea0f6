"""What users of vLLM, Transformers, OpenAI and llama.cpp type, and what forerun calls it: for Python and for flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from forerun.errors import ConfigError

_GRAMMAR = "|Give grammar=forerun.Grammar.json_schema(...), or .json_object, .regex, .choice or .lark."
_NO_BEAMS = "There is no beam search: forerun samples, or takes the most probable token."
_OFFLINE = "Models are read from folders and the local Hub cache alone: name the folder of the one that you mean."
_ONE_PROCESS = "forerun computes a model in one process: docs/scaling.md."
_NO_CODE = "No code that comes with a model is run."
_PROMPT = "Give the prompt itself first, without a name: text; in Python also token ids, or a list of prompts."
_TEXT = "token_ids holds all tokens; skip_special_tokens=False shows special ones in the text."
_LEAVE = "Leave it out: forerun needs no such option."

HABITS: Mapping[str, str] = {
    # tokens and sampling
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_gen_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "do_sample": "temperature=0",
    "greedy": "temperature=0",
    "temp": "temperature",
    "num_return_sequences": "n",
    "best_of": "n",
    "top_logprobs": "logprobs",
    "output_scores": "logprobs",
    "output_logits": "logprobs",
    "return_logprobs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "eos_token_id": "stop_token_ids",
    "suppress_tokens": "logit_bias",
    "bad_words_ids": "bad_words",
    "random_seed": "seed",
    "manual_seed": "seed",
    "cache_salt": "tenant",
    "guided_decoding": "json_schema" + _GRAMMAR,
    "guided_json": "json_schema" + _GRAMMAR,
    "guided_regex": "regex" + _GRAMMAR,
    "guided_choice": "regex" + _GRAMMAR,
    "guided_grammar": "lark" + _GRAMMAR,
    "structured_outputs": "json_schema" + _GRAMMAR,
    "response_format": "json_schema" + _GRAMMAR,
    "num_beams": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "spaces_between_special_tokens": _TEXT,
    "detokenize": _TEXT,
    "no_repeat_ngram_size": "Give repetition_penalty, presence_penalty or frequency_penalty.",
    "logits_processors": "Give logit_bias, penalties or a grammar: a function of the logits would not be exact.",
    "logits_processor": "Give logit_bias, penalties or a grammar: a function of the logits would not be exact.",
    "stopping_criteria": "Give stop or stop_token_ids, or end the iterator of LLM.stream.",
    "truncate_prompt_tokens": "No prompt is cut: shorten it, as tokens of LLM.get_tokenizer().",
    # what is generated, and how it is returned
    "params": "Its name is sampling_params: generate(prompts, sampling_params).",
    "generation_config": "Give sampling_params=SamplingParams(...).",
    "input_ids": 'Give token ids as the prompt, a list: generate(ids.tolist()), or {"prompt_token_ids": ids}.',
    "prompt_token_ids": 'Give token ids as the prompt, a list, or {"prompt_token_ids": ids}.',
    "inputs": _PROMPT,
    "text": _PROMPT,
    "prompt": _PROMPT,
    "p": _PROMPT,
    "attention_mask": _LEAVE,
    "pad_token_id": _LEAVE,
    "use_cache": _LEAVE,
    "return_dict_in_generate": _LEAVE,
    "request_id": _LEAVE,
    "stream": "Call LLM.stream(prompt), which yields chunks.",
    "streamer": "Call LLM.stream(prompt), which yields chunks.",
    "lora_request": "Give LLM(adapter=FOLDER): an adapter is merged when the model is loaded.",
    "enable_lora": "Give LLM(adapter=FOLDER): an adapter is merged when the model is loaded.",
    "enable_thinking": 'Give chat_template_kwargs={"enable_thinking": ...} to LLM.chat.',
    "chat_template_content_format": "Contents are text, or lists of parts of text.",
    # the model
    "model": "model",
    "m": "model",
    "target": "model",
    "model_path": "model",
    "model_id": "model",
    "model_name": "model",
    "pretrained_model_name_or_path": "model",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "device_map": "device",
    "n_gpu_layers": "device",
    "quantization": "quantize",
    "quantization_config": "quantize='int4'",
    "load_in_4bit": "quantize='int4'",
    "load_in_8bit": "quantize='int8'",
    "lora": "adapter",
    "n_ctx": "max_model_len",
    "num_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "t": "threads",
    "n_threads": "threads",
    "num_threads": "threads",
    "threads": "Set the environment variable OMP_NUM_THREADS.",
    "trust_remote_code": _NO_CODE,
    "revision": _OFFLINE,
    "code_revision": _OFFLINE,
    "tokenizer_revision": _OFFLINE,
    "download_dir": _OFFLINE,
    "cache_dir": _OFFLINE,
    "hf_token": _OFFLINE,
    "token": _OFFLINE,
    "hf_overrides": "Change config.json in the model's folder.",
    "rope_scaling": "Change config.json in the model's folder.",
    "tokenizer_mode": "Give tokenizer=, an object of Transformers or a folder.",
    "skip_tokenizer_init": "Leave it out: a model without a tokenizer takes and gives token ids.",
    "load_format": "Files are safetensors or GGUF, which forerun finds out.",
    "attn_implementation": _LEAVE,
    "low_cpu_mem_usage": _LEAVE,
    "compilation_config": _LEAVE,
    "enforce_eager": "Leave it out: CUDA graphs are recorded where they alter no bit.",
    "disable_log_stats": _LEAVE,
    "disable_custom_all_reduce": _LEAVE,
    # memory, batches, processes
    "gpu_memory_utilization": "cache_memory",
    "kv_cache_memory_bytes": "cache_memory",
    "mem_fraction_static": "cache_memory",
    "swap_space": "cache_memory",
    "cpu_offload_gb": _LEAVE,
    "kv_transfer_config": "prompt_cache",
    "slot_save_path": "prompt_cache",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "block_size": "Pages hold 64 positions.",
    "max_num_seqs": "max_batch",
    "batch_size": "max_batch",
    "max_num_batched_tokens": "prefill_chunk",
    "enable_chunked_prefill": "prefill_chunk",
    "enable_prefix_caching": "prefix_reuse='off'",
    "tensor_parallel_size": _ONE_PROCESS,
    "tensor_parallel": _ONE_PROCESS,
    "pipeline_parallel_size": _ONE_PROCESS,
    "data_parallel_size": _ONE_PROCESS,
    "distributed_executor_backend": _ONE_PROCESS,
    # drafters
    "draft": "drafter",
    "assistant_model": "drafter",
    "speculative_model": "drafter",
    "model_draft": "drafter",
    "speculative_method": "drafter",
    "prompt_lookup_num_tokens": "drafter='prompt-lookup'",
    "num_speculative_tokens": "num_draft_tokens",
    "num_assistant_tokens": "num_draft_tokens",
    "speculative_num_draft_tokens": "num_draft_tokens",
    "draft_max": "num_draft_tokens",
    "draft_tokens": "num_draft_tokens",
    "speculative_config": "drafter",
}
"""Name -> forerun's options, perhaps with a value, of which the first that is there counts; or, last, a sentence."""

_NEAR = 0.7
"""Of what `get_close_matches` measures: less has put `prediction` beside `n_predict`."""

ANY = None
CHANGE_NOTHING: Mapping[str, tuple[Any, ...] | None] = {
    "spaces_between_special_tokens": ANY,
    "detokenize": (True,),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "best_of": (1,),
    "do_sample": (True,),
    "use_cache": (True,),
    "chat_template_content_format": ("auto", "string"),
    "trust_remote_code": (False,),
    "revision": ("main",),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "load_format": ("auto", "safetensors"),
    "low_cpu_mem_usage": ANY,
    "compilation_config": ANY,
    "enforce_eager": (False,),
    "request_id": ANY,
    "disable_log_stats": ANY,
    "disable_custom_all_reduce": ANY,
    "swap_space": ANY,
    "cpu_offload_gb": (0, 0.0),
    "enable_lora": (False,),
    "enable_chunked_prefill": (True,),
    "enable_prefix_caching": (True,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
}
"""Those of HABITS that are taken, with these values or with any, since forerun does so anyway. So is None with all."""

ON_GPUS = ("enforce_eager", "gpu_memory_utilization")
"""Those that change nothing where no GPU computes."""


_TEXTS_ONLY = "forerun generates text, and computes no embeddings or scores."
_HERE = "A model is computed in this process: call the function with llm.target."
_FREED = "Nothing sleeps: close the LLM and drop it, which frees the memory, and make it again."
_IN_STATS = "The figures of an answer are in its stats; a server's are at /metrics."
_NO_IDS = "Answers go to who asked, without an id."
_CANCEL = "Cancel the task that waits, or close the iterator of AsyncLLM.stream."
_LOADED = "Give LLM(model, device=..., dtype=...): a model stays as it was loaded."
_TOKENIZER = "Call it of llm.get_tokenizer()."

MEMBERS: Mapping[str, str] = {
    # of an LLM
    "beam_search": _NO_BEAMS,
    "embed": _TEXTS_ONLY,
    "create_embedding": _TEXTS_ONLY,
    "score": _TEXTS_ONLY + " SamplingParams(prompt_logprobs=0) gives a text's log-probabilities.",
    "reward": _TEXTS_ONLY,
    "classify": _TEXTS_ONLY + " SamplingParams(grammar=Grammar.choice([...])) has the model choose.",
    "sleep": _FREED,
    "wake_up": _FREED,
    "collective_rpc": _HERE,
    "apply_model": _HERE,
    "get_metrics": _IN_STATS,
    "llm_engine": "Take llm.target, the model (context_length, vocab_size), or llm.engine, which is forerun's own.",
    "model_config": "Take llm.target, the model (context_length, vocab_size).",
    "config": "Take llm.target, the model (context_length, vocab_size).",
    "model": "Take llm.target.",
    "start_profile": "Profile with torch.profiler: a model is computed in this process.",
    "stop_profile": "Profile with torch.profiler: a model is computed in this process.",
    "to": _LOADED,
    "cuda": _LOADED,
    "half": _LOADED,
    "save_pretrained": "`forerun export hf` writes a folder for Transformers.",
    "create_completion": "Call generate(prompt).",
    "create_chat_completion": "Call chat(messages).",
    "tokenize": "Call encode(prompt).",
    "detokenize": "Call decode of llm.get_tokenizer().",
    "decode": _TOKENIZER,
    "apply_chat_template": _TOKENIZER,
    "abort": _CANCEL,
    "add_request": "Call generate or stream.",
    "shutdown": "Call close().",
    # of an answer
    "metrics": _IN_STATS,
    "request_id": _NO_IDS,
    "num_cached_tokens": _IN_STATS,
    "cumulative_logprob": "Add the logprobs up: sum(each.logprob for each in choice.logprobs).",
}
"""What others' models and answers have -> what does the same."""


class Hinted:
    """What says, of attributes that it lacks and others' have, what does the same."""

    __slots__ = ()

    if not TYPE_CHECKING:  # or every name would be known to a type checker

        def __getattr__(self, name: str) -> NoReturn:
            said = f"{type(self).__name__} has no {name!r}. {MEMBERS.get(name, '')}"
            raise AttributeError(said.rstrip(), name=name, obj=self)  # to which Python adds a similar name


def translated(
    given: Mapping[str, Any],
    known: Collection[str],
    error: type[ConfigError],
    owner: str,
    elsewhere: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the known options, without others that change nothing.

    Args:
        owner: what the options are of.
        elsewhere: other places -> their options.

    Raises:
        error: naming all unknown options and what they are called here.
    """
    remedies: dict[str, str] = {}
    for name, value in given.items():
        if name not in known and not _changes_nothing(name, value):
            remedies[name] = hint(name, known)
            for place, names in elsewhere.items():
                if (option := option_for(name, names)) and not option_for(name, known):
                    remedies[name] = f"Give {option} to {place}."
    if remedies:
        said = [f"{owner} has no option {name!r}. {remedy}".rstrip() for name, remedy in remedies.items()]
        there = [] if all(remedies.values()) else [f"There are: {', '.join(known)}."]
        raise error(" ".join(said + there))
    return {name: value for name, value in given.items() if name in known}


def hint(name: str, known: Collection[str], spelled: Callable[[str], str] = str, *, sentences: bool = True) -> str:
    """Return a sentence that says what to give in place of an unknown option; empty if nothing is like it.

    Args:
        known: the options that there are.
        spelled: writes an option, perhaps with a value ("temperature=0"), as the user would.
        sentences: what HABITS says beside options is for the user too.
    """
    if option := option_for(name, known):
        return f"Did you mean {spelled(option)}?"
    *_, instead = HABITS.get(name, "").split("|")
    if instead and sentences:
        return instead if " " in instead else f"forerun calls it {instead}, which cannot be given here."
    close = get_close_matches(name, known, n=1, cutoff=_NEAR)
    return f"Did you mean {spelled(close[0])}?" if close else ""


def option_for(name: str, known: Collection[str]) -> str:
    """Return the known option that a name stands for, perhaps with its value; empty if there is none."""
    options = HABITS.get(name, name).split("|")
    return next((option for option in options if option.partition("=")[0] in known), "")


def _changes_nothing(name: str, value: object) -> bool:
    allowed = CHANGE_NOTHING.get(name, ())
    is_allowed = allowed is ANY or any(type(value) is type(each) and value == each for each in allowed)
    return name in HABITS and (value is None or is_allowed)
