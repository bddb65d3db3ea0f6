"""Drafters' texts: what stands in quotes, and what a draft model beside a drafter means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from forerun import Hybrid
from forerun.drafters import DRAFTERS, build_drafter
from forerun.drafters.parse_text import drafter_of_vllm, hybrid_of, quoted, source_texts, split_spec, text_of, unquoted
from forerun.drafters.registry import with_draft_model
from forerun.drafters.third_party import named_module
from forerun.errors import ConfigError, DrafterError
from forerun.utils.json_file import Fields

PATHS = (
    "/models/draft",
    "/a,b/draft.gguf",
    "/c++/draft",
    'C:\\models\\new "one", 2+\\draft.gguf',
    "/模型/草稿,é+1",
    " /spaces ",
    "/semi;colon",
    '"',
)


@pytest.mark.parametrize("path", PATHS)
def test_any_path_can_be_an_option_and_a_source(path: str) -> None:
    assert split_spec(text_of("eagle", {"model": path, "quantize": "int4"}))[1] == {"model": path, "quantize": "int4"}
    inner = text_of("eagle", {"model": path, "quantize": "int4"})
    name, options = split_spec(hybrid_of("suffix", path, inner, mode="merge"))
    assert (name, options["mode"]) == ("hybrid", "merge")
    assert source_texts(options["sources"]) == ["suffix", path, inner]


@given(st.lists(st.text(), min_size=2, max_size=4, unique=True))
def test_quoting_is_undone(texts: list[str]) -> None:
    for text in texts:
        assert unquoted(quoted(text)) == text
    sources = split_spec(hybrid_of(*texts))[1]["sources"]
    assert source_texts(sources) == texts


def test_what_needs_no_quotes_has_none() -> None:
    assert hybrid_of("suffix", "C:\\a b\\draft", mode="merge") == "hybrid:sources=suffix+C:\\a b\\draft,mode=merge"
    assert text_of("suffix", {}) == "suffix"


def test_a_source_may_have_options_of_its_own() -> None:
    text = 'hybrid:sources=suffix+"early-exit:exit_layer=1,quantize=int8"'
    with pytest.raises(DrafterError, match="has no option 'quantize'"):
        build_drafter(text)
    made = build_drafter('hybrid:sources="suffix:min_match=3,share=false"+early-exit:exit_layer=1,mode=merge')[0]
    assert isinstance(made, Hybrid) and len(made.members) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("draft-model:model=/a,b/c", "stands in double quotes"),
        ('draft-model:model="/a,b/c', "not closed"),
        ("hybrid:sources=suffix+/c++/draft", "stands in double quotes"),
        ('hybrid:sources=suffix+"/c+/draft', "not closed"),
    ],
)
def test_errors_tell_the_rule(text: str, said: str) -> None:
    with pytest.raises(DrafterError, match=said):
        build_drafter(text)


@pytest.mark.parametrize("text", ['hybrid:sources=suffix+"os:System"', 'hybrid:sources="suffix+""os:System"""'])
def test_quotes_hide_no_module(text: str) -> None:
    assert named_module(text) == "os:System"


def test_a_path_of_vllms_form_is_quoted() -> None:
    config = Fields.of({"model": "/a,b"}, "speculative_config", ConfigError)
    assert drafter_of_vllm(config) == 'draft-model:model="/a,b"'


@pytest.mark.parametrize(
    ("drafter", "meant"),
    [
        ("auto", "hybrid:sources=suffix+/d"),
        ("suffix", "hybrid:sources=suffix+/d"),
        ("suffix:min_match=2", "hybrid:sources=suffix:min_match=2+/d"),
        ("suffix:min_match=2,num_draft_tokens=4", "hybrid:sources=suffix:min_match=2+/d,num_draft_tokens=4"),
        ("hybrid", "hybrid:sources=suffix+/d"),
        ("hybrid:mode=merge", "hybrid:sources=suffix+/d,mode=merge"),
        ("draft-model", "draft-model:model=/d"),
        ("draft-model:num_draft_tokens=4", "draft-model:model=/d,num_draft_tokens=4"),
        ("draft-tree", "draft-tree:model=/d"),
        ("staged:drafter=suffix", "staged:model=/d,drafter=suffix"),
        ("cross-vocab", "cross-vocab:model=/d"),
    ],
)
def test_a_draft_model_beside_a_drafter(drafter: str, meant: str) -> None:
    assert with_draft_model(drafter, "/d") == meant
    build_drafter(meant)


@pytest.mark.parametrize("drafter", ["none", "eagle", "rest", "draft-model:model=/e", "hybrid:sources=suffix+/e"])
def test_a_drafter_that_takes_no_draft_model(drafter: str) -> None:
    with pytest.raises(DrafterError, match="draft-model"):
        with_draft_model(drafter, "/d")


@pytest.mark.parametrize("model", ["eagle", "suffix:min_match=2"])
def test_a_drafter_is_no_draft_model(model: str) -> None:
    with pytest.raises(DrafterError, match="which is a drafter"):
        with_draft_model("auto", model)


@pytest.mark.parametrize("name", [name for name, row in DRAFTERS.items() if row.with_draft_model])
def test_rows_quote_a_draft_model(name: str) -> None:
    text: Any = DRAFTERS[name].drafting_with("/a,b+c")
    assert text == "/a,b+c" or '"/a,b+c"' in text
    build_drafter(text)
