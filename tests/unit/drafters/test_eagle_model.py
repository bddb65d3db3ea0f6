"""An EAGLE head computes its formulas: compared with a slow reference without cache, batch and tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import VOCAB, make_family
from forerun.drafters.models.eagle.layer import NativeEagleLayer, ReferenceEagleLayer
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.heads.config import StoredHead
from forerun.errors import IncompatibleDrafterError
from forerun.models import Model, Rows, load_model
from heads import random_head, reference_logits, states_of

ATTENTION = [f"midlayer.self_attn.{each}_proj" for each in "qkvo"]
PUBLISHED: dict[str, Any] = {
    "num_layers": 2,
    "head_norms": True,
    "biases": ("fc", "layers.1.mlp.down_proj", *ATTENTION),
    "norm_all_before_fc": True,
    "max_positions": 64,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "first version": {"version": 1},
    "mtp": {"version": 1, "is_mtp": True},
    "mtp with output rows": {"version": 1, "is_mtp": True, "norm_output": True, "own_output_rows": True},
    "published": PUBLISHED,
    "published, normed": {**PUBLISHED, "norm_output": True, "draft_vocab_size": 40, "own_output_rows": True},
    "published, first version": {
        "version": 1,
        "num_layers": 2,
        "biases": ("fc", *(f"layers.0.self_attn.{each}_proj" for each in "qkv")),
        "rope_scaling": YARN,
        "max_positions": 64,
    },
    "reduced": {"draft_vocab_size": 40, "own_output_rows": True},
    "everything": {
        "draft_vocab_size": 40,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "embedding_residual": True,
        "sliding_window": 5,
        "rope_theta": 500.0,
    },
    "narrow": {"hidden_size": 48, "own_output_rows": True, "norm_output": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Model:
    return load_model(folder, dtype="float64")


def made(head: StoredHead, target: Model) -> EagleModel:
    return EagleModel(head, target)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def difference(own: Tensor, expected: Tensor) -> float:
    """Return the largest difference where both are finite, and check that both are not finite at the same entries."""
    assert torch.equal(own.isinf(), expected.isinf())
    return float((own - expected).nan_to_num(0.0, 0.0, 0.0).abs().max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas(kind: str, target: Model) -> None:
    """Compare two sequences in one forward, in chunks; then drafted rows, whose states are the outputs of the rows
    before."""
    head = random_head(target, **KINDS[kind])
    model = made(head, target)
    texts = [tokens(14, 1), tokens(9, 2)]
    caches = [model.new_cache(), model.new_cache()]
    hidden_outputs = [states_of(target, head, text) for text in texts]
    expected = [
        reference_logits(head, target, [*text[1:], 3, 5, 7], part, 2)
        for text, part in zip(texts, hidden_outputs, strict=True)
    ]
    fused = [model.fuse(part) for part in hidden_outputs]
    got: list[list[Tensor]] = [[], []]
    for chunk in (slice(1, 6), slice(6, None)):
        batch = [
            Rows(cache, text[chunk], states=part[chunk.start - 1 : len(text[: chunk.stop]) - 1])
            for cache, text, part in zip(caches, texts, fused, strict=True)
        ]
        result = model.forward(batch)
        for own, part in zip(got, torch.split(result.logits, [len(rows.token_ids) for rows in batch]), strict=True):
            own.append(part)
        for rows in batch:
            rows.cache.commit(range(len(rows.token_ids)))
    last = [part[-1:] for part in fused]
    for token in (3, 5, 7):
        result = model.forward([Rows(cache, [token], states=state) for cache, state in zip(caches, last, strict=True)])
        assert result.hidden_outputs is not None
        last = [result.hidden_outputs[0], result.hidden_outputs[1]]
        for own, part in zip(got, result.logits, strict=True):
            own.append(part[None])
    for own, whole in zip(got, expected, strict=True):
        assert difference(model.widened(torch.cat(own)), whole) < 1e-5  # angles are of float32


def test_every_path_of_a_tree_is_a_chain(target: Model) -> None:
    head = random_head(target, draft_vocab_size=40)
    model = made(head, target)
    text = tokens(11, 3)
    hidden_outputs = states_of(target, head, text)
    cache = model.new_cache()
    model.forward([Rows(cache, text[1:], states=model.fuse(hidden_outputs)[:-1])])
    cache.commit(range(10))
    first = model.forward([Rows(cache, [4, 9], [-1, -1], states=model.fuse(hidden_outputs[-1:]).expand(2, -1))])
    assert first.hidden_outputs is not None
    second = model.forward([Rows(cache, [8, 8, 2], [0, 1, 1], states=first.hidden_outputs[[0, 1, 1], 0])])
    for path, logits in (([4, 8], second.logits[0]), ([9, 8], second.logits[1]), ([9, 2], second.logits[2])):
        expected = reference_logits(head, target, [*text[1:], *path], hidden_outputs, 1)[-1]
        assert difference(model.widened(logits[None])[0], expected) < 1e-5


@pytest.mark.parametrize("form", [{"norm_before_fc": True}, PUBLISHED], ids=["eagle", "published"])
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "quantize": "int8"}]
)
def test_other_number_formats_are_near(
    options: dict[str, str], form: dict[str, Any], folder: Path, target: Model
) -> None:
    """Compare dtypes, and check that rows have the same bits alone and in a batch."""
    other = load_model(folder, **options)  # type: ignore[arg-type]
    head = random_head(target, draft_vocab_size=40, **form)
    text = tokens(20, 4)
    rows = []
    for each in (target, other):
        model = made(head, each)
        hidden_outputs = states_of(each, head, text)
        rows.append(model.forward([Rows(model.new_cache(), text[1:], states=model.fuse(hidden_outputs)[:-1])]).logits)
        if each is other:
            cache, alone = model.new_cache(), []
            for at in range(19):
                alone.append(
                    model.forward(
                        [Rows(cache, text[at + 1 : at + 2], states=model.fuse(hidden_outputs[at : at + 1]))]
                    ).logits
                )
                cache.commit([0])
            assert torch.equal(torch.cat(alone), rows[-1])
    exact, near = rows
    assert difference(near.double(), exact) < (0.01 if options["dtype"] == "float32" else 0.5)
    assert (near.argmax(-1) == exact.argmax(-1)).float().mean() > 0.7


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", KINDS)
def test_one_native_call_computes_what_pytorch_does(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare heads with the same quantized weights: chunks of committed rows, then a tree of two depths."""
    target = load_model(folder, dtype="float32", quantize="int8")
    head = random_head(target, **KINDS[kind])
    text = tokens(23, 6)
    hidden_outputs = states_of(target, head, text)
    found: list[list[Tensor]] = []
    for layer in (NativeEagleLayer, ReferenceEagleLayer):
        model = made(head, target)
        assert isinstance(model._layer, layer)
        monkeypatch.setenv("FORERUN_KERNELS", "reference")  # a head's kernels are chosen when it is made
        cache, states = model.new_cache(), model.fuse(hidden_outputs)
        rows: list[Tensor] = []
        for chunk in (slice(1, 9), slice(9, None)):
            fed = text[chunk]
            part = states[chunk.start - 1 : chunk.start - 1 + len(fed)]
            result = model.forward([Rows(cache, fed, num_logits=2, states=part)])
            cache.commit(range(len(fed)))
            rows.append(result.logits)
        first = model.forward([Rows(cache, [4, 9], [-1, -1], states=states[-1:].expand(2, -1))])
        assert first.hidden_outputs is not None
        second = model.forward(
            [Rows(cache, [8, 8, 2], [0, 1, 1], num_logits=2, states=first.hidden_outputs[[0, 1, 1], 0])]
        )
        assert second.hidden_outputs is not None
        found.append(
            [*rows, first.logits, second.logits, first.hidden_outputs[:, 0], second.hidden_outputs[:, 0], states]
        )
    for native_part, reference_part in zip(*found, strict=True):
        assert native_part.shape == reference_part.shape
        assert (native_part - reference_part).norm() < 0.003 * reference_part.norm()


@pytest.mark.parametrize("options", [{"vocab_size": VOCAB + 1, "draft_vocab_size": 40}, {"target_hidden_size": 32}])
def test_a_head_of_another_target_is_refused(options: dict[str, int], target: Model) -> None:
    head = random_head(target, **{"draft_vocab_size": 40, **options})  # type: ignore[arg-type]
    with pytest.raises(IncompatibleDrafterError, match="a head is of a target"):
        made(head, target)
