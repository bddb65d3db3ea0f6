"""A target is told from others whatever its weights are kept in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.drafters import Eagle
from forerun.drafters.base import Binding
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.fingerprint import (
    Fingerprint,
    check_target,
    embedding_fingerprint,
    same_target,
    target_fingerprint,
)
from forerun.errors import IncompatibleDrafterError
from forerun.kernels.quantize import quantize_int4, quantize_int8
from forerun.models import Model, load_draft_model, load_model
from gguf_files import pack, write_gguf
from gguf_models import tiny
from heads import random_head


@dataclass
class Weights:
    """A target that is nothing but its outer layers."""

    embedding: Tensor
    output: Tensor
    name: str = "a target"
    num_parameters: int = 1000

    @property
    def vocab_size(self) -> int:
        return len(self.embedding)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        return self.embedding[token_ids]

    def output_rows(self, token_ids: Tensor) -> Tensor:
        return self.output[token_ids]


def random_weights(seed: int = 0, vocab_size: int = 300) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return Weights(*(torch.randn(vocab_size, 64, generator=generator) for _ in range(2)))


def test_the_bundled_models() -> None:
    target = target_fingerprint(load_model("bundled"))
    assert same_target(target, target_fingerprint(load_model("bundled", quantize="int8")))
    assert not same_target(target, target_fingerprint(load_draft_model("bundled-draft")))
    sizes = Fingerprint.parse(target)
    assert sizes is not None
    assert (sizes.vocab_size, sizes.hidden_size) == (4096, 256)


def rounded(weight: Tensor, form: str) -> Tensor:
    if form == "int8":
        return quantize_int8(weight).dequantize(torch.float32)
    if form == "int4":
        return quantize_int4(weight).dequantize(torch.float32)
    if form.startswith("Q"):
        return pack(weight.numpy(), form)[1]
    return weight.to(getattr(torch, form)).float()


@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", "int4", "Q8_0", "Q5_0", "Q4_0"])
def test_number_formats_are_one_target(form: str) -> None:
    one = random_weights()
    two = Weights(rounded(one.embedding, form), rounded(one.output, form))
    assert same_target(target_fingerprint(one), target_fingerprint(two))


def test_other_weights_are_another_target() -> None:
    one, other = random_weights(), random_weights(1)
    found = target_fingerprint(one)
    for different in (
        other,
        Weights(one.embedding, other.output),
        Weights(other.embedding, one.output),
        Weights(one.embedding, one.output, num_parameters=900),  # fewer layers
        random_weights(vocab_size=301),
        Weights(one.embedding[:, :40], one.output[:, :40]),
    ):
        assert not same_target(found, target_fingerprint(different))


def test_trained_a_little_further_is_the_same_and_anew_is_not() -> None:
    one, other = random_weights(), random_weights(1)
    moved = Weights(one.embedding + 0.05 * other.embedding, one.output + 0.05 * other.output)
    assert same_target(target_fingerprint(one), target_fingerprint(moved))
    anew = Weights(one.embedding + 2 * other.embedding, one.output + 2 * other.output)
    assert not same_target(target_fingerprint(one), target_fingerprint(anew))


def test_an_output_layer_that_repeats_the_embedding_counts_once() -> None:
    one, other, size = random_weights(), random_weights(1), 300 * 64
    tied = Weights(one.embedding, one.embedding)
    twice = Weights(rounded(one.embedding, "Q5_0"), rounded(one.embedding, "Q8_0"), num_parameters=1000 + size)
    assert same_target(target_fingerprint(tied), target_fingerprint(twice))
    assert same_target(target_fingerprint(twice), target_fingerprint(tied))
    for different in (
        replace(twice, num_parameters=1000 + size + 1),
        replace(twice, num_parameters=1000 + 2 * size),
        Weights(one.embedding, one.output, num_parameters=1000 + size),
        Weights(other.embedding, other.embedding, num_parameters=1000 + size),
    ):
        assert not same_target(target_fingerprint(tied), target_fingerprint(different))
    untied = Weights(one.embedding, one.output)
    assert not same_target(target_fingerprint(untied), target_fingerprint(replace(untied, num_parameters=1000 + size)))


def test_a_head_fits_a_file_that_holds_a_tied_embedding_twice(tmp_path: Path) -> None:
    """As published GGUF files of Qwen2.5 do; whichever it was trained on. One of fewer layers is refused."""
    whole, shorter = (
        tiny("qwen2", tie_word_embeddings=True),
        tiny("qwen2", tie_word_embeddings=True, num_hidden_layers=1),
    )
    models: list[Model] = []
    for model in (whole, shorter):
        folder = tmp_path / f"{model.config.num_hidden_layers} layers"
        model.save_pretrained(folder)
        twice = tiny("qwen2", tie_word_embeddings=False, num_hidden_layers=model.config.num_hidden_layers)
        twice.load_state_dict(model.state_dict())
        file = folder.with_suffix(".gguf")
        write_gguf(file, twice, lambda name: {"lm_head.weight": "Q8_0"}.get(name, "Q5_0"))
        models += [load_model(folder), load_model(file)]
    first, second = models[:2]
    assert second.num_parameters - first.num_parameters == first.vocab_size * whole.config.hidden_size
    for trained_on in (first, second):
        head, place = random_head(trained_on), tmp_path / f"head {trained_on.num_parameters}"
        save_head(place, head.config, head.tensors, fingerprint=target_fingerprint(trained_on))
        for target in (first, second):
            Eagle(place).bind(Binding(target))
        for target in models[2:]:
            with pytest.raises(IncompatibleDrafterError, match="was trained for another target"):
                Eagle(place).bind(Binding(target))


def test_an_embedding_alone_is_compared_with_a_whole_target() -> None:
    one, other = random_weights(), random_weights(1)
    part = embedding_fingerprint(one.embedding_rows, 300, 64)
    assert same_target(part, target_fingerprint(one))
    assert not same_target(part, target_fingerprint(other))


def test_a_head_of_another_target_is_refused_with_the_reason() -> None:
    one, other = random_weights(), random_weights(1)
    check_target(target_fingerprint(one), one, "head")
    check_target("", other, "head")
    with pytest.raises(IncompatibleDrafterError, match=r"head was trained for another target than a target: \d+%"):
        check_target(target_fingerprint(one), other, "head")
    with pytest.raises(IncompatibleDrafterError, match="300 tokens, not 301"):
        check_target(target_fingerprint(one), random_weights(vocab_size=301), "head")
    with pytest.raises(IncompatibleDrafterError, match="cannot be read"):
        check_target("what", one, "head")


def test_texts_that_are_no_fingerprints() -> None:
    good = target_fingerprint(random_weights())
    assert str(Fingerprint.parse(good)) == good
    for text in ("", "-", "1-2-3-4", "a-2-3--", good[:-1], good + "0", good.replace("-", "+"), "1-2-3--" + "g" * 64):
        assert Fingerprint.parse(text) is None
        assert not same_target(text, text)


def test_the_values_are_part_of_a_file_format() -> None:
    rows = (torch.arange(300)[:, None].square() * 31 + torch.arange(48).square() * 17) % 11 - 5
    assert target_fingerprint(Weights(rows, rows.flip(0))) == (
        "300-48-1000-79048b4a39dd202ecc26960b3770411bcd2d2202d06449070044b4b31dd202dc-"
        "608b4b351bd0284cee9699097832140b28a2d2d144e9097629b4b0113202d8de"
    )
