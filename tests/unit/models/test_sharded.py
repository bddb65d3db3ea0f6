"""A model that several ranks compute: parts, bits, what is gathered, what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from families import make_family
from forerun import LLM, SamplingParams
from forerun.errors import ConfigError, NonFiniteError, RankError, UnsupportedModelError
from forerun.kernels.quantise import quantise_int4, quantise_int8
from forerun.models import Rows, load_model
from forerun.models.sharded import check_tensor_parallel
from forerun.models.sharded.shard import Shard, share, share_of_units
from forerun.models.sharded.tensors import read_part
from gguf_files import write_gguf
from thread_ranks import sharded

PROMPTS = [[5, 9, 12, 5, 9, 12, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(seed=7, max_tokens=14, ignore_eos=True, logprobs=0, n=2)
DRAFTERS: tuple[Any, ...] = ("suffix", "recycling", "lookahead", "early-exit:exit_layer=1")


def uneven(folder: Path) -> Path:
    """A Llama with three key heads, an intermediate width and a vocabulary that two ranks cannot share equally."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=100,
        hidden_size=54,
        intermediate_size=120,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=512,
        attention_bias=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=99,
    )
    model = tf.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(0, 0.12)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "uneven")
    write_gguf(folder / "Q8_0.gguf", tied(model), "Q8_0")
    write_gguf(folder / "Q4_0.gguf", tied(model), "Q4_0")
    return folder / "uneven"


def tied(model: Any) -> Any:
    """One without biases whose output layer is its table of embeddings, in widths that blocks of 32 divide."""
    config = tf.LlamaConfig(**{**model.config.to_dict(), "attention_bias": False, "hidden_size": 96})
    config.intermediate_size, config.tie_word_embeddings = 160, True
    torch.manual_seed(4)
    made = tf.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sharded")
    made = {name: make_family(name, folder) for name in ("llama", "qwen2", "qwen3")}
    made["uneven"] = uneven(folder)
    return made | {name: folder / f"{name}.gguf" for name in ("Q8_0", "Q4_0")}


def answers(model: Any, drafter: Any, k: int = 5) -> list[Any]:
    llm = LLM(model, drafter, num_draft_tokens=k)
    found = []
    for params in (GREEDY, SEEDED):
        for generation in llm.generate(PROMPTS, params):
            found += [(c.token_ids, [entry.logprob for entry in c.logprobs or ()]) for c in generation.choices]
    return found


CASES = [
    ("llama", "float32", None, 2),
    pytest.param("uneven", "float32", None, 2, marks=pytest.mark.slow),
    ("qwen2", "bfloat16", None, 2),
    ("qwen3", "bfloat16", "int8", 2),
    ("uneven", "bfloat16", "int8", 3),
    ("uneven", "bfloat16", None, 3),
    pytest.param("uneven", "bfloat16", "int4", 2, marks=pytest.mark.slow),
    pytest.param("Q8_0", "bfloat16", "int8", 3, marks=pytest.mark.slow),
    ("Q4_0", "float32", "int4", 2),
    pytest.param("Q4_0", "float32", None, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "dtype", "quantize", "count"), CASES)
def test_speculation_changes_no_bit(
    folders: dict[str, Path], family: str, dtype: str, quantize: str | None, count: int
) -> None:
    with sharded(folders[family], dtype, count, quantize) as model:
        assert model.exactness.exact, model.exactness.reason
        expected = answers(model, None)
        for drafter in DRAFTERS:
            assert answers(model, drafter) == expected, drafter
        model.pool.check_integrity()


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_codes_of_8_bits_give_the_bits_of_one_process(
    folders: dict[str, Path], kernels: str, monkeypatch: pytest.MonkeyPatch, native_library: object
) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", kernels)
    one = answers(load_model(folders["uneven"], "float32", quantize="int8"), None)
    with sharded(folders["uneven"], "float32", 2, "int8") as model:
        assert answers(model, "suffix") == one


def test_float64_gives_the_tokens_of_one_process(folders: dict[str, Path]) -> None:
    one = answers(load_model(folders["llama"], "float64"), None)
    with sharded(folders["llama"], "float64") as model:
        assert [tokens for tokens, _ in answers(model, None)] == [tokens for tokens, _ in one]


def test_the_reference_adds_bfloat16_in_float32(folders: dict[str, Path], reference_kernels: None) -> None:
    with sharded(folders["qwen2"], "bfloat16") as model:
        assert answers(model, "suffix") == answers(model, None)


@pytest.mark.parametrize(("dtype", "quantize", "a_layer"), [("float32", None, 2), ("bfloat16", "int8", 4)])
def test_two_gathers_a_layer_and_one_for_the_logits(
    folders: dict[str, Path], dtype: str, quantize: str | None, a_layer: int
) -> None:
    """With codes of 8 bits, the rows' largest magnitudes are gathered too."""
    with sharded(folders["llama"], dtype, 2, quantize) as model:
        cache = model.new_cache()
        model.forward([Rows(cache, [1, 2, 3])])
        before = model.moved.gathers
        model.forward([Rows(cache, [4])])
        assert model.moved.gathers - before == a_layer * model.num_layers + 1
        cache.free()


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_halves_of_layers_are_the_layers(folders: dict[str, Path], quantize: str | None, native_library: Any) -> None:
    """A single rank adds up nothing: the halves and their products give the bits of the call for all layers."""
    one = load_model(folders["qwen3"], "bfloat16", quantize=quantize)
    with sharded(folders["qwen3"], "bfloat16", 1, quantize) as model:
        found = []
        for each in (one, model):
            cache = each.new_cache()
            found.append(each.forward([Rows(cache, PROMPTS[1])], layers=(0, 1, 2)))
            cache.free()
    assert torch.equal(found[0].logits, found[1].logits)
    assert found[0].taps is not None and found[1].taps is not None
    assert torch.equal(found[0].taps, found[1].taps)


def test_rows_of_the_outer_layers_are_those_of_one_process(folders: dict[str, Path]) -> None:
    ids = torch.tensor([0, 47, 48, 95, 3])
    one = load_model(folders["llama"], "float32")
    with sharded(folders["llama"]) as model:
        assert torch.equal(model.embedding_rows(ids), one.embedding_rows(ids))
        assert torch.equal(model.output_rows(ids), one.output_rows(ids))
        assert model.num_parameters == one.num_parameters
        assert model.pool.page_nbytes == one.pool.page_nbytes


@pytest.mark.parametrize("weight", ["self_attn.o_proj", "input_layernorm"])
def test_weights_that_are_not_finite_are_named(folders: dict[str, Path], tmp_path: Path, weight: str) -> None:
    model = tf.LlamaForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        model.get_parameter(f"model.layers.0.{weight}.weight").fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with sharded(tmp_path) as found:
        assert not found.exactness.exact
        assert found.exactness.reason is not None
        assert weight in found.exactness.reason
        with pytest.raises(NonFiniteError, match=weight):
            LLM(found, None).generate(PROMPTS[0], GREEDY)


def test_a_forward_that_fails_here_is_not_ordered(folders: dict[str, Path]) -> None:
    """The pool has no page for the second row: nobody else has computed anything, and all goes on."""
    with sharded(folders["llama"]) as model:
        model.pool.limit(4)
        first, second = model.new_cache(), model.new_cache()
        with pytest.raises(Exception, match="page"):
            model.forward([Rows(first, [1, 2]), Rows(second, [1] * 400)])
        first.drop()
        second.drop()
        assert model.forward([Rows(first, [1, 2, 3])]).logits.shape == (3, 96)
        first.commit(range(3))
        assert model.forward([Rows(first, [4])]).logits.shape == (1, 96)
        first.free()
        second.free()


def test_a_forward_that_is_cut_short_ends_the_group(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with sharded(folders["llama"]) as model:
        cache = model.new_cache()
        monkeypatch.setattr(type(model), "_of_all_tokens", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward([Rows(cache, [1])])
        lost: list[RankError] = []
        model.when_lost(lost.append)
        with pytest.raises(RankError, match="cut short"):
            model.forward([Rows(cache, [1])])


def test_states_that_differ_name_the_rank(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.models.sharded import linear

    monkeypatch.setattr(linear, "COMPARED_EVERY", 1)
    with sharded(folders["llama"]) as model:
        cache = model.new_cache()
        model.forward([Rows(cache, [1])])
        of = linear.GatheredLogits.of

        def broken(self: Any, part: Any, states: Any) -> Any:
            return of(self, part, states if self._peers.is_leader else states + 1)

        monkeypatch.setattr(linear.GatheredLogits, "of", broken)
        with pytest.raises(RankError, match="Rank 1 has computed other states") as caught:
            model.forward([Rows(cache, [1])])
        assert caught.value.rank == 1


def config(**others: Any) -> Any:
    shape = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96, "head_dim": 8}
    return SimpleNamespace(**{**shape, "intermediate_size": 100, "vocab_size": 50, **others})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_cover_the_model_once(count: int) -> None:
    shards = [Shard.of(config(), rank, count) for rank in range(count)]
    for name, size in (("heads", 12), ("kv_heads", 3), ("intermediate", 100), ("vocabulary", 50)):
        spans = [getattr(shard, name) for shard in shards]
        assert [spans[0][0], spans[-1][1]] == [0, size]
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(first < last for first, last in spans)
    for shard in shards:
        assert shard.heads == (shard.kv_heads[0] * 4, shard.kv_heads[1] * 4)
        assert shard.intermediate[0] % 32 == 0


def test_shares_differ_by_one_unit_at_most() -> None:
    assert [share(7, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 7)]
    assert [share_of_units(100, 32, rank, 2) for rank in range(2)] == [(0, 64), (64, 100)]
    with pytest.raises(ConfigError, match="shares"):
        share_of_units(40, 32, 0, 3)


def test_more_ranks_than_key_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 key heads"):
        Shard.of(config(), 0, 4)


def test_codes_are_cut_at_whole_groups() -> None:
    shard = Shard.of(config(), 0, 2)  # one key head: 4 query heads of width 8
    shard.check_groups("model.layers.0.self_attn.o_proj.weight", "m")
    odd = Shard.of(config(num_attention_heads=9), 0, 2)  # 24 inputs
    with pytest.raises(UnsupportedModelError, match="at input 24"):
        odd.check_groups("model.layers.0.self_attn.o_proj.weight", "m")


def test_columns_of_codes_are_those_of_the_numbers() -> None:
    weight = torch.randn(8, 96)
    for quantise in (quantise_int8, quantise_int4):
        codes = quantise(weight)
        whole = codes.dequantise(torch.float32)
        assert torch.equal(codes.columns(32, 96).dequantise(torch.float32), whole[:, 32:])


def test_a_rank_reads_its_part_alone(folders: dict[str, Path]) -> None:
    from safetensors import safe_open

    from forerun.models.sharded.shard import Cut

    with safe_open(folders["llama"] / "model.safetensors", "pt") as file:
        name = "model.layers.0.self_attn.o_proj.weight"
        whole = file.get_tensor(name)
        assert torch.equal(read_part(file.get_slice(name), Cut(1, 32, 64)), whole[:, 32:64])
        assert torch.equal(read_part(file.get_slice(name), Cut(0, 5, 9)), whole[5:9])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, "cpu", None), "at least 1"),
        ((True, "cpu", None), "at least 1"),
        ((2, "cuda", None), "CPU only"),
        ((2, "cpu", "folder"), "adapter"),
    ],
)
def test_what_ranks_cannot_do_is_refused(arguments: tuple[Any, Any, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_tensor_parallel(*arguments)


def test_a_launcher_of_another_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="3 ranks"):
        check_tensor_parallel(2, "cpu", None)
    check_tensor_parallel(1, "cpu", None)


def test_models_of_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not of the Llama family"):
        LLM(make_family("gpt2", tmp_path), None, tokenizer=None, tensor_parallel=2)


def test_a_loaded_model_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="loaded model"):
        LLM(load_model(folders["llama"], "float32"), None, tensor_parallel=2)
