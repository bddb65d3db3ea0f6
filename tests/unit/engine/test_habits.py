"""What users of vLLM and Transformers type: each line runs, or is refused with what forerun calls it."""

import asyncio
import copy
import pickle
from inspect import signature
from typing import Any

import pytest
import torch
import typer

import forerun
from doubles import FakeModel, PieceTokenizer
from forerun.cli.main import Commands, UsageError, app
from forerun.drafters import chosen_drafter
from forerun.drafters.registry import DRAFTERS
from forerun.engine import llm as module
from forerun.errors import ConfigError, PromptError
from forerun.utils.fields import described
from forerun.utils.habits import CHANGE_NOTHING, HABITS, ON_GPUS

CHAT = [{"role": "user", "content": "bc"}]


class ChatTokenizer(PieceTokenizer):
    chat_template = "a template"

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return "".join(message["content"] for message in messages) + "k" * options.get("enable_thinking", False)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the lines may use. A model that is named is a fake one; `opened` is with what it was opened."""
    fake, tokenizer = FakeModel(seed=3), ChatTokenizer([bytes([byte]) for byte in b"abcdefghijk"])
    fake.recommended_sampling = {"temperature": 0.6, "top_k": 20.0}  # type: ignore[attr-defined]
    opened: dict[str, Any] = {}

    def open_target(model: Any, drafter: Any, *_: Any, **options: Any) -> tuple[Any, Any, Any]:
        opened.update(options)
        return fake, tokenizer, chosen_drafter(drafter, fake)

    monkeypatch.setattr(module, "open_target", open_target)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: opened.update(threads=threads))
    llm = forerun.LLM("bundled", drafter="suffix", seed=1)
    outputs = llm.generate(["bcd", "e"], forerun.SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    given = {"LLM": forerun.LLM, "SamplingParams": forerun.SamplingParams, "torch": torch, "forerun": forerun}
    given |= {"copy": copy, "pickle": pickle}
    return {**given, "AsyncLLM": forerun.AsyncLLM, "llm": llm, "outputs": outputs, "chat": CHAT, "opened": opened}


RUNS = [
    # LLM
    "LLM(model='bundled', drafter='suffix').num_draft_tokens == 'auto'",
    "LLM('bundled', dtype=torch.bfloat16, drafter='suffix') and opened['dtype'] == 'bfloat16'",
    "LLM('bundled', dtype='auto', drafter='suffix') and opened['dtype'] == 'auto'",
    "LLM('bundled', drafter='suffix', max_model_len=64) and opened['max_model_len'] == 64",
    "LLM('bundled', drafter='suffix', quantization='int8') and opened['quantize'] == 'int8'",
    "LLM('bundled', drafter='suffix', quantization=None) and opened['quantize'] is None",
    "LLM('bundled', drafter='suffix', seed=0, threads=2) and opened['threads'] == 2",
    "LLM('bundled', drafter='suffix', tensor_parallel_size=1, pipeline_parallel_size=1)",
    "LLM('bundled', drafter='suffix', enforce_eager=True)",
    "LLM('bundled', drafter='suffix', device='cuda', enforce_eager=False)",
    "LLM('bundled', drafter='suffix', gpu_memory_utilization=0.9)",
    "LLM('bundled', drafter='suffix', trust_remote_code=False, revision=None, tokenizer_mode='auto')",
    "LLM('bundled', drafter='suffix', swap_space=4, enable_prefix_caching=True, disable_log_stats=True)",
    "LLM('bundled', drafter='suffix', kv_cache_dtype='auto', enable_chunked_prefill=True, load_format='auto')",
    "'min_ngram=3' in LLM('bundled', speculative_config={'method': 'ngram', 'prompt_lookup_max': 3}).drafter_name",
    "LLM('bundled', speculative_config={'method': 'ngram', 'num_speculative_tokens': 5}).num_draft_tokens == 5",
    "LLM('bundled', speculative_config={'method': 'suffix'}).drafter_name == 'suffix'",
    "LLM('bundled', speculative_config={'method': 'suffix', 'draft_tensor_parallel_size': 1}).drafter is not None",
    "LLM('bundled', drafter='none', speculative_config=None).drafter_name is None",
    # generate
    "llm.generate('bcd').text",
    "llm.generate('bcd', SamplingParams(temperature=0, max_tokens=3)).token_ids[2:]",
    "llm.generate('bcd', sampling_params=SamplingParams(max_tokens=3)).finish_reason == 'length'",
    "llm.generate(prompts=['bcd'], use_tqdm=True)[0].outputs[0].text",
    "llm.generate('bcd', max_tokens=3, temperature=0.5, top_p=0.9).outputs[0].token_ids[2:]",
    "llm.generate('bcd', {'max_tokens': 3, 'temperature': 0}).finish_reason == 'length'",
    "len(llm.generate(['bcd', 'e'], [{'max_tokens': 3}, SamplingParams(max_tokens=4)])[1].token_ids) == 4",
    "len(llm.generate('bcd', SamplingParams(max_tokens=9), max_tokens=2).token_ids) == 2",
    "llm.generate({'prompt': 'bcd'}, max_tokens=1).prompt == 'bcd'",
    "llm.generate({'prompt_token_ids': [1, 2]}, max_tokens=1).prompt_token_ids == [1, 2]",
    "[each.prompt for each in llm.generate([{'prompt': 'bcd'}, {'prompt_token_ids': [1]}])] == ['bcd', None]",
    "llm.generate([1, 2, 3], max_tokens=1).prompt is None",
    "llm.generate([[1, 2], [3]], max_tokens=1)[1].prompt_token_ids == [3]",
    "llm.generate('bcd', SamplingParams(n=2, max_tokens=3)).outputs[1].index == 1",
    "llm.generate('bcd', do_sample=True, use_cache=True, num_beams=1, max_tokens=1)",
    "llm.generate('bcd', lora_request=None, max_tokens=1)",
    "llm.generate('bcd', max_tokens=2)[0].outputs[0].text",
    "[output.outputs[0].text for output in llm.generate('bcd', max_tokens=2)][0]",
    # SamplingParams
    "SamplingParams(top_k=-1) == SamplingParams(top_k=0)",
    "SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop='x', seed=7).stop == ('x',)",
    "SamplingParams(stop=None, logit_bias=None, seed=None, logprobs=None) == SamplingParams()",
    "SamplingParams(skip_special_tokens=True, detokenize=True, best_of=None, use_beam_search=False).n == 1",
    "SamplingParams(presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, min_p=0.05, min_tokens=1)",
    # results
    "outputs[0].prompt == 'bcd' and outputs[0].prompt_token_ids == [1, 2, 3]",
    "[(each.prompt, each.outputs[0].text) for each in outputs]",
    "outputs[0].outputs[0].text == outputs[0].text and outputs[0].outputs[0].finish_reason == 'length'",
    "len(outputs[0].outputs) == 1 and outputs[0].outputs[0].index == 0",
    "repr(outputs[0]).startswith(\"Generation('bcd', Choice('\") and '\\n' not in repr(outputs[0])",
    # chat, stream, tokenizer, end
    "llm.chat(chat, SamplingParams(max_tokens=2)).prompt_token_ids == [1, 2]",
    "llm.chat(messages=chat, sampling_params=SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text",
    "len(llm.chat([chat, chat], max_tokens=2)) == 2",
    "llm.chat(chat, chat_template_kwargs={'enable_thinking': True}, max_tokens=1).prompt_token_ids == [1, 2, 10]",
    "llm.chat(chat, chat_template='{{ messages }}', add_generation_prompt=True, tools=None, max_tokens=1)",
    "''.join(chunk.text for chunk in llm.stream('bcd', SamplingParams(max_tokens=3)))",
    "len(list(llm.stream(chat, max_tokens=3, chat_template_kwargs={'enable_thinking': True}))) == 3",
    "llm.get_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == 'bc'",
    "llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)",
    "LLM('bundled', drafter='suffix').__enter__().__exit__(None, None, None) is None",
    # what others' models and answers have
    "LLM.from_pretrained('bundled', drafter='suffix').generate('bcd', max_tokens=2).finished",
    "repr(LLM('bundled', drafter='suffix')) == \"LLM('fake', float32, drafter='suffix', exact)\"",
    "repr(AsyncLLM(llm)) == f'Async{llm!r}'",
    "repr(LLM('bundled', None)) == \"LLM('fake', float32, drafter=None, exact)\"",
    "not hasattr(llm, 'beam_search') and not hasattr(outputs[0], 'metrics')",
    "copy.deepcopy(outputs[0]) == pickle.loads(pickle.dumps(outputs[0])) == outputs[0]",
]
REFUSED = [
    # LLM
    ("LLM('bundled', tensor_parallel_size=2)", "one process"),
    ("LLM('bundled', pipeline_parallel_size=2)", "one process"),
    ("LLM('bundled', trust_remote_code=True)", "No code"),
    ("LLM('bundled', device='cuda', gpu_memory_utilization=0.5)", "Did you mean cache_memory?"),
    ("LLM('bundled', device='cuda', enforce_eager=True)", "CUDA graphs"),
    ("LLM('bundled', max_num_seqs=8)", "Did you mean max_batch?"),
    ("LLM('bundled', enable_prefix_caching=False)", "Did you mean prefix_reuse='off'?"),
    ("LLM('bundled', revision='abc')", "local Hub cache"),
    ("LLM('bundled', torch_dtype=torch.float32)", "Did you mean dtype?"),
    ("LLM('bundled', device_map='auto')", "Did you mean device?"),
    ("LLM('bundled', load_in_4bit=True)", "Did you mean quantize='int4'?"),
    ("LLM(pretrained_model_name_or_path='bundled')", "Did you mean model?"),
    ("LLM('bundled', n_ctx=512)", "Did you mean max_model_len?"),
    ("LLM('bundled', assistant_model='x')", "Did you mean drafter?"),
    ("LLM('bundled', num_speculative_tokens=3)", "Did you mean num_draft_tokens?"),
    ("LLM('bundled', temperature=0)", "Give temperature to SamplingParams."),
    ("LLM('bundled', max_new_tokens=9)", "Give max_tokens to SamplingParams."),
    ("LLM('bundled', qunatize='int8')", "Did you mean quantize?"),
    ("LLM('bundled', threads=0)", "threads is 0"),
    ("LLM('bundled', max_model_len='4k')", "max_model_len is '4k'"),
    ("LLM('bundled', quantize='int8', quantization='int4')", "Give one of them"),
    ("LLM('bundled', speculative_config={'method': 'dflash', 'model': 'x'})", "one of 'ngram', 'suffix'"),
    ("LLM('bundled', speculative_config={'method': 'ngram', 'parallel_drafting': True})", "parallel_drafting is not"),
    ("LLM('bundled', speculative_config={'method': 'draft_model'})", "model is missing"),
    ("LLM('bundled', drafter='suffix', speculative_config={'method': 'suffix'})", "Give it or them"),
    ("AsyncLLM(model='bundled', max_num_seqs=8)", "Did you mean max_batch?"),
    # generate
    ("llm.generate('bcd', max_new_tokens=3)", "Did you mean max_tokens?"),
    ("llm.generate('bcd', do_sample=False)", "Did you mean temperature=0?"),
    ("llm.generate('bcd', num_return_sequences=2)", "Did you mean n?"),
    ("llm.generate('bcd', num_beams=4)", "no beam search"),
    ("llm.generate('bcd', params=SamplingParams())", "Its name is sampling_params"),
    ("llm.generate(input_ids=torch.tensor([[1]]))", "prompt_token_ids"),
    ("llm.generate(prompt_token_ids=[1, 2])", "prompt_token_ids"),
    ("llm.generate(torch.tensor([1, 2]))", r"\.tolist\(\)"),
    ("llm.generate({'input_ids': [1]})", "give input_ids as a list"),
    ("llm.generate({'prompt': 'b', 'multi_modal_data': {}})", "multi_modal_data"),
    ("llm.generate('bcd', stream=True)", "LLM.stream"),
    ("llm.generate('bcd', lora_request=1)", "adapter=FOLDER"),
    ("llm.generate('bcd', 5)", "must be SamplingParams"),
    ("llm.generate('bcd', generation_config=None, temprature=1)", "Did you mean temperature?"),
    # SamplingParams
    ("SamplingParams(max_length=3)", "Did you mean max_tokens?"),
    ("SamplingParams(stop_strings=['x'])", "Did you mean stop?"),
    ("SamplingParams(guided_json={})", "Grammar.json_schema"),
    ("SamplingParams(structured_outputs={})", "Grammar.json_schema"),
    ("SamplingParams(detokenize=False)", "token_ids holds all tokens"),
    ("SamplingParams(bad_words_ids=[[1]])", "Did you mean bad_words?"),
    ("SamplingParams(top_k=-2)", "-1 or more"),
    # chat
    ("llm.chat('hello')", "list of messages"),
    ("llm.chat(chat, enable_thinking=False)", "chat_template_kwargs"),
    ("llm.stream(['a', 'b'])", "takes one prompt"),
    # names
    ("forerun.AsyncLLMEngine", "take AsyncLLM"),
    ("llm.beam_search(['a'])", "LLM has no 'beam_search'. There is no beam search"),
    ("llm.embed('a')", "no embeddings"),
    ("llm.score('a', 'b')", "no embeddings or scores.*prompt_logprobs"),
    ("llm.classify('a')", r"Grammar\.choice"),
    ("llm.sleep(level=1)", "close the LLM"),
    ("llm.collective_rpc('f')", r"llm\.target"),
    ("llm.apply_model(print)", r"llm\.target"),
    ("llm.get_metrics()", "in its stats"),
    ("llm.llm_engine.model_config", r"llm\.target"),
    ("AsyncLLM(llm).abort('1')", "Cancel the task"),
    ("outputs[0].metrics.first_token_time", "Generation has no 'metrics'. .*in its stats"),
    ("outputs[0].outputs[0].cumulative_logprob", "Choice has no 'cumulative_logprob'. Add the logprobs"),
    ("llm.nothing_like_it", "LLM has no 'nothing_like_it'.$"),
    # all of a call at once
    ("LLM('bundled', max_num_seqs=8, n_ctx=9, top_p=1)", "max_batch.*max_model_len.*Give top_p to SamplingParams"),
    (
        "SamplingParams(max_length=3, stop_strings='x', zzz=1)",
        "Did you mean max_tokens.*stop.*'zzz'. There are: temperature, ",
    ),
    ("forerun.AutoModelForCausalLM", r"take LLM\(model\)"),
]


@pytest.mark.parametrize("line", RUNS)
def test_a_line_that_runs(line: str, names: dict[str, Any]) -> None:
    assert eval(line, names)


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_a_line_that_is_refused(line: str, said: str, names: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, PromptError, ImportError, AttributeError), match=said):
        eval(line, names)


def test_the_asynchronous_interface_takes_the_same(names: dict[str, Any]) -> None:
    async def ask() -> None:
        async with forerun.AsyncLLM(names["llm"]) as llm:
            assert (await llm.generate({"prompt": "bcd"}, {"max_tokens": 3}, use_tqdm=False)).prompt == "bcd"
            assert len(await llm.generate(["bcd", "e"], max_tokens=2)) == 2
            kwargs = {"enable_thinking": True}
            assert (await llm.chat(CHAT, max_tokens=1, chat_template_kwargs=kwargs)).prompt_token_ids == [1, 2, 10]
            assert [chunk.token_ids async for chunk in llm.stream("bcd", max_tokens=1, temperature=0)]
            assert await llm.get_tokenizer() is names["llm"].get_tokenizer()
            with pytest.raises(ConfigError, match="Did you mean max_tokens"):
                await llm.generate("bcd", max_new_tokens=3)

    asyncio.run(ask())


def test_an_answer_is_awaited_as_a_coroutine_or_seen_to_grow(names: dict[str, Any]) -> None:
    async def ask() -> None:
        params = forerun.SamplingParams(seed=5, max_tokens=5, n=2, logprobs=1, prompt_logprobs=0)
        async with forerun.AsyncLLM(names["llm"]) as llm:
            whole = await asyncio.create_task(llm.generate("bcd", params))
            said = [(each.text, each.token_ids, each.logprobs, each.finish_reason) for each in whole.outputs]
            (same,) = await asyncio.gather(llm.generate("bcd", params))
            grown = [output async for output in llm.generate("bcd", params, "an id")]
            for last in (same, grown[-1]):
                assert said == [(each.text, each.token_ids, each.logprobs, each.finish_reason) for each in last.outputs]
                assert last.prompt_logprobs == whole.prompt_logprobs
            assert [output.finished for output in grown] == [*[False] * (len(grown) - 1), True]
            lengths = [len(output.token_ids) for output in grown]
            assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 5
            assert all(whole.text.startswith(output.text) for output in grown)
            with pytest.raises(PromptError, match="takes one prompt"):
                [output async for output in llm.generate(["bcd", "e"], params)]
            late = asyncio.create_task(llm.generate("bcd", max_tokens=10**4, ignore_eos=True))
            await asyncio.sleep(0.01)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late

    asyncio.run(ask())


def test_a_bar_is_shown_on_a_terminal_for_several_prompts(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, counted = names["llm"], []
    llm.generate(["bcd", "e"], max_tokens=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate("bcd", max_tokens=1)
    llm.generate(["bcd"], max_tokens=1, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["bcd", "e"], max_tokens=1)
    assert "prompts:" in capsys.readouterr().err
    llm.generate(["bcd", "e"], max_tokens=1, use_tqdm=lambda each, **_: counted.extend(each) or each)
    assert len(counted) == 2


FLAGS = {
    ("generate", "hi", "--max-new-tokens", "3"): "Did you mean --max-tokens?",
    ("generate", "hi", "--do-sample"): "Did you mean --temperature 0?",
    ("generate", "hi", "--draft", "suffix"): "Did you mean --drafter?",
    ("generate", "hi", "--load-in-4bit"): "Did you mean --quantize int4?",
    ("generate", "hi", "--guided-json", "{}"): "Did you mean --json-schema?",
    ("generate", "hi", "--tensor-parallel-size", "2"): "forerun computes a model in one process",
    ("tune", "bundled", "--threads", "2"): "Set the environment variable OMP_NUM_THREADS.",
    ("chat", "--ctx-size", "64"): "Did you mean --max-model-len?",
    ("serve", "bundled", "--max-num-seqs", "4"): "Did you mean --max-batch?",
    ("serve", "bundled", "--gpu-memory-utilization", "0.9"): "Did you mean --cache-memory?",
    ("serve", "bundled", "--num-speculative-tokens", "4"): "Did you mean --num-draft-tokens?",
    ("serve", "bundled", "--quantization", "int8"): "Did you mean --quantize?",
    ("generate", "hi", "--dtyp", "float32"): "Did you mean --dtype?",
    ("generate", "hi", "--nothing-like-it"): "No such option: --nothing-like-it.",
}


@pytest.mark.parametrize("line", FLAGS, ids=" ".join)
def test_a_flag_of_others(line: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(app)
    assert isinstance(command, Commands)
    with pytest.raises(UsageError) as caught:
        command.main(list(line), prog_name="forerun", standalone_mode=False)
    assert FLAGS[line] in caught.value.format_message()


def test_the_table_names_what_there_is() -> None:
    here = {*signature(forerun.LLM).parameters, *described(forerun.SamplingParams), "sampling_params"}
    here |= {"json_schema", "regex", "lark"}
    for name, said in HABITS.items():
        for option in said.split("|"):
            assert " " in option or option.partition("=")[0] in here, name
    assert set(CHANGE_NOTHING) | set(ON_GPUS) <= set(HABITS)
    assert not {name for name in HABITS if name in described(forerun.SamplingParams)}
    assert "prompt-lookup" in DRAFTERS


def test_a_prefix_cache_is_reset() -> None:
    with forerun.LLM("bundled", "draft-model", prefix_reuse="on", seed=1) as llm:
        prompt = [5] * 200

        def cached() -> int:
            return llm.generate(prompt, max_tokens=4).stats.num_cached_tokens

        assert (cached(), cached()) == (0, 192)
        stream = llm.stream(prompt, max_tokens=99, ignore_eos=True)
        next(stream)
        shares = llm.target.kernels.startswith("native")  # the reference's published pages are copies
        assert llm.reset_prefix_cache() is not shares  # the stream holds its pages yet
        stream.close()
        assert llm.reset_prefix_cache() is True
        pools = [llm.target.pool, *(llm.drafter.pools if llm.drafter is not None else ())]
        assert [pool.num_taken for pool in pools if pool is not None] == [0, 0]
        assert (cached(), cached()) == (0, 192)


def test_max_model_len_bounds_prompts_answers_and_the_cache() -> None:
    with forerun.LLM("bundled", None, max_model_len=70, max_batch=2, dtype=torch.float32, threads=1) as llm:
        assert llm.target.context_length == 70 and llm.target.dtype == torch.float32
        assert llm.target.pool is not None and llm.target.pool.num_pages == 4  # two sequences of two pages
        with pytest.raises(PromptError, match="70 tokens, but the context of bundled holds 70"):
            llm.generate([1] * 70)
        assert len(llm.generate([1] * 60, max_tokens=99, ignore_eos=True, temperature=0)[0].token_ids) == 10
        with pytest.raises(ConfigError, match="loaded model"):
            forerun.LLM(llm.target, None, max_model_len=30)
    with pytest.raises(ConfigError, match="Lower it"):
        forerun.LLM("bundled", None, max_model_len=10**6)
