"""What an aborted request has computed of its prompt, the next one takes over: the same bits, of its tenant alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from doubles import FakeModel
from families import VOCAB, Folders
from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import Drafter, Suffix
from forerun.engine import Choice, Engine
from forerun.kernels.cpu import native
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import LanguageModel, Model, load_draft_model, load_model
from pool_integrity import check_integrity
from pooled import PAGE as SMALL_PAGE, PooledModel

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
KINDS = ["bfloat16", "float32", "int8", "reference", "recurrent", "recurrent reference", "window", "latent"]
FAMILY = {"recurrent": "qwen3_5_text", "recurrent reference": "lfm2", "window": "mistral", "latent": "deepseek_v3"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model of each kind of cache: pages, contiguous slots, 8-bit values, latents, and states of two kinds."""
    kind = request.param
    if "reference" in kind:
        monkeypatch.setenv("FORERUN_KERNELS", "reference")
    if kind == "int8" and native() is None:
        pytest.skip("there are no native kernels here")
    if kind in FAMILY:
        return load_model(Path(folders[FAMILY[kind]]), "float32")
    if kind == "int8":
        return load_model("bundled-draft", kv_cache_dtype="int8")
    return load_draft_model("bundled-draft", "bfloat16" if kind == "reference" else kind)


def engine_of(target: LanguageModel, drafter: Drafter | None = None, **options: object) -> Engine:
    return Engine(target, drafter, config=EngineConfig(prefix_reuse="on", **options))


def answer(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> Choice:
    number = engine.add(prompt, params)
    last = {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    assert last[number].error is None
    return last[number].choice


def abort_after(engine: Engine, prompt: list[int], num_steps: int, params: SamplingParams = GREEDY) -> None:
    number = engine.add(prompt, params)
    for _ in range(num_steps):
        engine.step()
    engine.abort(number)
    assert [output.choice.finish_reason for output in engine.step()] == ["abort"]


def test_an_aborted_prompt_is_continued_where_it_was(model: Model) -> None:
    """Three of six chunks: whole pages are there, of the tenant's own alone, and the answer is the same."""
    chunk = PAGE + PAGE // 2
    prompt = [(7 * i * i + 3 * i + 11) % min(VOCAB, model.vocab_size) for i in range(6 * chunk)]
    expected = answer(Engine(model, None, config=EngineConfig(prefix_reuse="off")), prompt)
    engine = engine_of(model, Suffix(), num_draft_tokens=3, prefill_chunk=chunk)
    abort_after(engine, prompt, 3)
    other = answer(engine, prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, tenant="another"))
    assert other.stats.num_cached_tokens == 0
    again = answer(engine, prompt)
    at_least = 3 * PAGE if model.state_nbytes else 4 * PAGE  # states are at the ends of chunks, which end with a page
    assert at_least <= again.stats.num_cached_tokens < 5 * PAGE and again.stats.num_cached_tokens % PAGE == 0
    assert (again.token_ids, again.logprobs) == (expected.token_ids, expected.logprobs)
    check_integrity(model.pool)


def test_what_holds_no_numbers_is_not_taken_over() -> None:
    """A prompt whose keys are NaN, by a fault that has gone."""
    model = load_draft_model("bundled-draft", "float32")
    prompt = [(7 * i) % 2000 for i in range(4 * PAGE)]
    expected = answer(engine_of(model), prompt)
    model.pool.forget()
    engine = engine_of(model, prefill_chunk=PAGE)
    engine.add(prompt, GREEDY)
    engine.step()
    (state,) = engine.scheduler.running
    keys, values = state.cache.read(len(state.cache.shapes) - 1)
    keys[0, 5, 3] = torch.nan
    state.cache.length = 0
    state.cache.feed(range(-1, PAGE - 1))
    state.cache.write(len(state.cache.shapes) - 1, 0, keys[:, :PAGE], values[:, :PAGE])
    state.cache.commit(range(PAGE))
    engine.abort(state.request.id)
    again = answer(engine, prompt)
    assert again.stats.num_cached_tokens == 0 and again.token_ids == expected.token_ids


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_preempted_prompt_continues_and_counts_its_own_pages_as_computed(num_steps: int) -> None:
    fake = PooledModel(1000)
    engine = engine_of(fake, max_batch=1, prefill_chunk=SMALL_PAGE)
    prompt = [i % 7 for i in range(5 * SMALL_PAGE + 2)]
    low = engine.add(prompt, SamplingParams(temperature=0, max_tokens=3, priority=-1))
    for _ in range(num_steps):
        engine.step()
    high = engine.add([9, 8], SamplingParams(temperature=0, max_tokens=1))
    last = {}
    while engine.has_work:
        last |= {output.request_id: output.choice for output in engine.step()}
    assert last[low].token_ids == FakeModel().greedy(prompt, 3) and last[high].token_ids
    assert (last[low].stats.num_preemptions, last[low].stats.num_cached_tokens) == (1, 0)
    assert fake.num_rows == len(prompt) + 2 + 2  # nothing was computed twice


def test_an_interrupted_stream_keeps_what_it_computed() -> None:
    """By the public interface: a stream that is closed before its first token, and then whole."""
    llm = LLM("bundled-draft", None, prefill_chunk=PAGE, prefix_reuse="on")
    prompt = [(5 * i) % 2000 for i in range(6 * PAGE)]
    (request,) = llm.requests([prompt], GREEDY, stream=True)
    llm.shared.add(request, [])
    for _ in range(3):
        llm.engine.advance()
    llm.shared.forget([request.id])
    assert llm.generate(prompt, GREEDY).stats.num_cached_tokens == 3 * PAGE
