"""LLM: every kind of prompt, streams that interleave, and what is refused."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from doubles import FakeModel, PieceTokenizer, Scripted, adversaries
from forerun import LLM, DraftModel, PromptLookup, SamplingParams
from forerun.engine.chat_template import encode
from forerun.errors import BatchError, ConfigError, DrafterError, PromptError, SamplingError
from small_tokenizers import END, TURN, byte_level, ids_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)


class ChatTokenizer(PieceTokenizer):
    chat_template = "a template"

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: object) -> str:
        assert options["add_generation_prompt"]
        if any(message["role"] == "nobody" for message in messages):
            raise ValueError("no such role")
        return "".join(message["content"] for message in messages)


PIECES = [bytes([byte]) for byte in b"abcdefghijk"]


@pytest.fixture
def fake() -> FakeModel:
    return FakeModel(seed=3)


@pytest.fixture
def llm(fake: FakeModel) -> LLM:
    return LLM(fake, PromptLookup(), tokenizer=ChatTokenizer(PIECES))


def text(token_ids: list[int]) -> str:
    return "".join("abcdefghijk"[i] for i in token_ids)


def test_one_prompt_of_each_kind(llm: LLM, fake: FakeModel) -> None:
    expected = fake.greedy([1, 2, 3], 12)
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    chats = ([{"role": "user", "content": first}, {"role": "user", "content": "d"}] for first in ("bc", parts))
    for prompt in ("bcd", [1, 2, 3], (1, 2, 3), *chats):
        result: Any = llm.generate(prompt, GREEDY)
        assert result.token_ids == expected
        assert result.text == text(expected)
        assert result.prompt_token_ids == [1, 2, 3]
        assert (result.finish_reason, result.stats.num_tokens, result.logprobs) == ("length", 12, None)


def test_many_prompts_of_mixed_kinds_each_with_its_params(llm: LLM, fake: FakeModel) -> None:
    prompts: Any = ["bcd", [4], [{"role": "user", "content": "aa"}]]
    results = llm.generate(prompts, [replace(GREEDY, max_tokens=n) for n in (3, 1, 7)])
    assert [result.token_ids for result in results] == [
        fake.greedy([1, 2, 3], 3),
        fake.greedy([4], 1),
        fake.greedy([0, 0], 7),
    ]
    assert [len(each) for each in (llm.generate([[1], [2]], GREEDY), llm.generate(["a"], GREEDY))] == [2, 1]


def test_more_prompts_than_places(fake: FakeModel) -> None:
    llm = LLM(fake, None, max_batch=2)
    results = llm.generate([[i] for i in range(11)], GREEDY)
    assert [result.token_ids for result in results] == [fake.greedy([i], 12) for i in range(11)]


def test_choices_have_noise_of_their_own_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=10)
    first, again = llm.generate("abc", params), llm.generate("abc", params)
    outputs = [choice.token_ids for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs == [choice.token_ids for choice in again.choices]
    one = llm.generate("abc", replace(params, n=1))
    assert one.token_ids == outputs[0]


@pytest.mark.parametrize("k", [1, 4])
def test_streams_give_what_generate_gives_and_interleave(fake: FakeModel, k: int) -> None:
    expected = [fake.greedy([i, 2], 12) for i in range(3)]
    plan = adversaries({(i, 2): fake.greedy([i, 2], 40) for i in range(3)}, 11)["right"]
    llm = LLM(fake, plan, num_draft_tokens=k, tokenizer=PieceTokenizer(PIECES))
    streams = [llm.stream([i, 2], GREEDY) for i in range(3)]
    chunks: list[list[Any]] = [[], [], []]
    for _ in range(20):
        for stream, own in zip(streams, chunks):
            own.extend(chunk for chunk in [next(stream, None)] if chunk)
    assert llm.generate([9], GREEDY).token_ids == fake.greedy([9], 12)
    for own, output in zip(chunks, expected):
        assert [token_id for chunk in own for token_id in chunk.token_ids] == output
        assert "".join(chunk.text for chunk in own) == text(output)
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1].stats.num_accepted_tokens == sum(chunk.num_accepted_draft for chunk in own)
        assert own[0].num_accepted_draft == len(own[0].token_ids) - 1


def test_a_stream_of_several_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=6)
    parts: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in llm.stream("abc", params):
        parts[chunk.index] += chunk.text
    assert list(parts.values()) == [choice.text for choice in llm.generate("abc", params).choices]


def test_a_stream_that_is_closed_or_never_begun_leaves_nothing(fake: FakeModel) -> None:
    plan = Scripted(lambda *_: [])
    llm = LLM(fake, plan)
    stream = llm.stream([1], GREEDY)
    next(stream)
    stream.close()
    llm.stream([2], GREEDY)
    gc.collect()
    assert len(llm.engine.scheduler) == 0
    assert all(cache.freed for cache in fake.caches)
    assert not plan.active


def test_an_error_reaches_the_caller_and_the_next_call_works(fake: FakeModel) -> None:
    llm = LLM(fake, None)

    def fail(batch: Any) -> None:
        if any((rows.cache.tokens or rows.token_ids)[0] == 5 for rows in batch):
            raise RuntimeError("broken on purpose")

    fake.before_forward = fail
    with pytest.raises(BatchError) as raised:
        llm.generate([[1], [5], [2]], GREEDY)
    assert [type(error) for error in raised.value.errors.values()] == [RuntimeError] and 1 in raised.value.errors
    answers = raised.value.generations
    assert [each and each.token_ids for each in answers] == [fake.greedy([1], 12), None, fake.greedy([2], 12)]
    assert len(llm.engine.scheduler) == 0
    assert all(cache.freed for cache in fake.caches)
    assert llm.generate([[1], [2]], GREEDY)[0].token_ids == fake.greedy([1], 12)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "nothing to continue"),
        ([], "empty"),
        ([[]], "nothing to continue"),
        (b"x", "type bytes cannot be read. .* Decode the bytes"),
        ([b"x"], "Decode the bytes"),
        ([5.0], "an entry of type float at index 0, which is no token id"),
        ([None], "type NoneType"),
        ("a\ud800", "lone surrogates"),
        ([{"role": "user", "content": "a\udcff"}], "lone surrogates"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts that are not text"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "text": "a"}]}],
            "Pictures, sound and files are not read",
        ),
        ([{"role": "user", "content": 5}], "content of message 0 of the chat is of type int"),
        ([1, "a"], "no token id"),
        ([1, 2.5], "no token id"),
        ([1, True], "no token id"),
        (5, "type int"),
        ({"role": "user"}, "type dict"),
        ([{"content": "a"}], "both 'role' and 'content'"),
        ([{"role": "nobody", "content": "a"}], "role .nobody., which is not known"),
        ([1] * 5000, "Shorten"),
        ([11], "outside the vocabulary"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        llm.generate(prompt, GREEDY)
    if prompt not in ([[]], [b"x"], [None]):
        with pytest.raises(PromptError, match=words):
            llm.stream(prompt, GREEDY)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("content", "written"),
    [
        (
            "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
            "a cat",
        ),
        ("{{ (m['content'] | selectattr('type', 'equalto', 'text') | first).text }}", "a cat"),
        ("{{ m['content'] | upper }}", "A CAT"),
        ("{{ m['content'] | replace('a', 'e') }}", "e cet"),
    ],
)
def test_templates_that_read_lists_of_parts_are_given_lists(content: str, written: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: " + content + "{% endfor %}"
    for given in ("a cat", [{"type": "text", "text": "a "}, {"text": "cat"}]):
        ids = encode([{"role": "user", "content": given}], tokenizer, "it")
        assert tokenizer.decode(ids) == f"user: {written}"


def test_what_needs_a_tokenizer_or_a_template(fake: FakeModel) -> None:
    bare = LLM(fake, None)
    with pytest.raises(PromptError, match="no tokenizer"):
        bare.generate("abc")
    with pytest.raises(SamplingError, match="stop_token_ids"):
        bare.generate([1], SamplingParams(stop=["a"]))
    with pytest.raises(PromptError, match="no chat template"):
        LLM(fake, None, tokenizer=PieceTokenizer(PIECES)).generate([{"role": "user", "content": "a"}])
    assert bare.generate([1], GREEDY).text == ""


def test_a_stop_string_that_is_a_special_token_stops_at_it() -> None:
    tokenizer = byte_level()
    fake = FakeModel(len(tokenizer), seed=3, num_contexts=499)
    for special in (END, TURN):
        [end] = ids_of(tokenizer, special)
        unstopped = SamplingParams(temperature=0, max_tokens=12, logit_bias={end: 4})
        expected = fake_tokens = LLM(fake, None, tokenizer=tokenizer).generate([5], unstopped).token_ids
        assert end in fake_tokens
        at = expected.index(end)
        result = LLM(fake, None, tokenizer=tokenizer).generate([5], replace(unstopped, stop=[special]))
        assert (result.token_ids, result.finish_reason) == (expected[: at + 1], "stop")
    later = replace(unstopped, stop=[TURN], min_tokens=12)
    assert end not in LLM(fake, None, tokenizer=tokenizer).generate([5], later).token_ids[:11]


def test_other_refusals(llm: LLM, fake: FakeModel) -> None:
    with pytest.raises(ConfigError, match="2 prompts but 3 sampling_params"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(PromptError, match="one prompt"):
        llm.stream([[1], [2]], GREEDY)
    with pytest.raises(SamplingError, match="has a prediction"):
        llm.stream([1], SamplingParams(prediction=[1, 2]))  # at once, before a chunk is asked for
    with pytest.raises(ConfigError, match="num_draft_tokens is -1"):
        LLM(fake, None, num_draft_tokens=-1)
    with pytest.raises(ConfigError, match="num_draft_tokens is 'car'"):
        LLM(fake, None, num_draft_tokens="car")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="acceptance is 'hope'"):
        LLM(fake, None, acceptance="hope")
    with pytest.raises(DrafterError, match=r"bundled draft.*hybrid:sources=suffix"):
        LLM(fake, "draft-model")
    assert LLM(fake, "hybrid").drafter_name == "hybrid:sources=suffix"  # the sources that there are
    assert LLM(fake, "hybrid:mode=merge").drafter_name == "hybrid:sources=suffix,mode=merge"
    with pytest.raises(DrafterError, match="'bundled-draft'"):
        LLM(fake, "bundled")
    assert LLM(fake, "none").drafter is None


def test_the_drafters_draws_are_not_the_engines(fake: FakeModel) -> None:
    """Rejection is exact only if the two are independent: one seed must not start the same generator twice."""
    drafter = DraftModel(FakeModel())
    llm = LLM(fake, drafter, seed=3)
    assert drafter.growth._generator.initial_seed() != llm.engine._loop._verifying._generator.initial_seed()


def test_num_draft_tokens_comes_from_the_call_then_the_drafters_text_then_the_default(fake: FakeModel) -> None:
    def k(drafter: Any, asked: Any = None) -> Any:
        return LLM(fake, drafter, num_draft_tokens=asked).engine.config.num_draft_tokens

    seven = "prompt-lookup:num_draft_tokens=7"
    assert (k(None), k(PromptLookup()), k(seven), k(seven, 2)) == ("auto", "auto", 7, 2)
    assert (k(seven, "auto"), k(PromptLookup(), 0)) == ("auto", 0)


@pytest.mark.parametrize("size", [0, 2, 8])
def test_a_model_is_computed_in_one_process(fake: FakeModel, size: int) -> None:
    LLM(fake, None, tensor_parallel_size=1)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}, but .* one process\. .* vLLM"):
        LLM(fake, None, tensor_parallel_size=size)


def test_another_librarys_model_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a Linear of another library's .*Speculative\(\)"):
        LLM(nn.Linear(2, 2), None)  # type: ignore[arg-type]


def test_a_chat_template_is_given(fake: FakeModel, tmp_path: Path) -> None:
    tokenizer = byte_level()
    model = FakeModel(len(tokenizer), seed=3)
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    file = tmp_path / "it.jinja"
    file.write_text(template)
    for given in (template, file, str(file)):
        llm = LLM(model, None, tokenizer=tokenizer, chat_template=given)
        assert llm.encode([{"role": "user", "content": "hello"}]) == tokenizer("hello!")["input_ids"]
    assert not tokenizer.chat_template
    tokenizer.chat_template = {"default": template}
    for odd in ([1], file):
        with pytest.raises(PromptError, match="chat_template is of type"):
            LLM(model, None, tokenizer=tokenizer).chat([{"role": "user", "content": "hello"}], chat_template=odd)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="cannot be read"):
        LLM(model, None, tokenizer=tokenizer, chat_template="nowhere.jinja")
    with pytest.raises(ConfigError, match="no tokenizer that reads one"):
        LLM(fake, None, chat_template=template)
