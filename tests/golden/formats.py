"""In which formats each product is kept, and how many bytes are planned for it, by what the files hold and what is
asked for."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch

import gguf_models
from families import tiny_model
from forerun.config import BUNDLED_TARGET, KERNELS_VARIABLE, REFERENCE, SHIPPED_HEADS
from forerun.drafters.models.head_files.memory import head_memory
from forerun.models.loading.configuration import OUTPUT_TOKENS
from forerun.models.memory_plan import model_memory
from gguf_files import write_gguf
from golden.models import draw, load_untried
from golden.processor import BITS, is_read, torch_key
from golden.sources import Sources
from golden.structures import Dump
from publications import PUBLICATIONS, publish

_WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
_LINEAR = re.compile(r"(?:\d+ x )?([A-Z]\w*) \d+x\d+")
_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XS", "IQ3_S"),
)
_ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "float32"},
    {"quantize": "none"},
    {"quantize": "int8"},
    {"quantize": "int4"},
    {"kv_cache_dtype": "int8"},
)
_MIXED = {"q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "Q8_0", "gate_proj": "Q4_0", "up_proj": "Q4_1"}
_MIXED |= {"down_proj": "Q5_K", "embed_tokens": "Q4_K", "lm_head": "Q6_K"}


def text(kind: str) -> str:
    """Return a block for each of some files, and in it what is kept for each format that can be asked for.

    kind: of KINDS.
    """
    with TemporaryDirectory() as folder, _quiet():
        return "\n".join([f"# Formats of weights: {kind}", *KINDS[kind](Path(folder))]) + "\n"


def _gguf(folder: Path) -> Iterator[str]:
    for name in _TYPES:
        asked = _ASKED if name in ("F32", "Q8_0", "Q4_K") else ({}, *_ASKED[3:5])
        yield from _of_file(f"GGUF, {name}", folder, "llama", name, asked)
    tied = {"tie_word_embeddings": True}
    for name in ("BF16", "Q8_0", "Q4_K"):
        yield from _of_file(f"GGUF, {name}, tied", folder, "llama", name, _ASKED[:4], **tied)
    yield from _of_file("GGUF, several types", folder, "llama", _mixed, _ASKED)
    yield from _of_file("GGUF, several types of experts", folder, "qwen3_moe", _mixed_experts, _ASKED)
    yield from _of_file("GGUF, several types, phi3", folder, "phi3", _mixed, _ASKED[:3])
    yield from _adapter(folder)


def _folders(folder: Path) -> Iterator[str]:
    for family in ("llama", "gpt2", "gpt_neox", "qwen3_moe", "gpt_oss", "deepseek_v2", "qwen3_5_text", "gemma4_text"):
        saved = folder / family
        draw(tiny_model(family)).save_pretrained(saved)
        yield from _blocks(f"folder, {family}", saved, _ASKED)
    yield from _output_tokens(folder)
    yield from _heads()


def _published(folder: Path) -> Iterator[str]:
    for name in PUBLICATIONS:
        path, _ = publish(name, folder)
        yield from _blocks(f"folder, {name}", path, ({}, {"quantize": "none"}, {"quantize": "int4"}))


def _of_file(
    title: str, folder: Path, family: str, types: Any, asked: tuple[dict[str, Any], ...], **options: Any
) -> Iterator[str]:
    path = folder / "it.gguf"
    sizes = {**_WIDE, "moe_intermediate_size": 256, "head_dim": 64} if "moe" in family else _WIDE
    write_gguf(path, draw(gguf_models.tiny(family, **sizes, **options)), types)
    yield from _blocks(title, path, asked)


def _mixed(name: str) -> str:
    return next((form for part, form in _MIXED.items() if part in name), "Q8_0")


def _mixed_experts(name: str) -> str:
    of_experts = {"gate_exps": "Q4_K", "up_exps": "Q5_K", "experts.down": "Q6_K"}
    return next((form for part, form in of_experts.items() if part in name), _mixed(name))


def _output_tokens(folder: Path) -> Iterator[str]:
    """Yield what is kept of a model that proposes a part of its tokens, with a tied and an untied output layer."""
    for is_tied in (False, True):
        saved = folder / f"part-{is_tied}"
        draw(tiny_model("llama", tie_word_embeddings=is_tied)).save_pretrained(saved)
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps({**config, OUTPUT_TOKENS: list(range(3, 43))}))
        yield from _blocks(f"folder, a part of the tokens, {'tied' if is_tied else 'untied'}", saved, _ASKED[:5])


def _adapter(folder: Path) -> Iterator[str]:
    """Yield what is kept of models with an adapter."""
    path, model = folder / "adapted.gguf", draw(gguf_models.tiny("llama", **_WIDE))
    write_gguf(path, model, "Q8_0")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    adapted = {"adapter": str(folder / "adapter")}
    asked = tuple({**each, **adapted} for each in _ASKED[:5])
    yield from _blocks("GGUF, Q8_0, with an adapter", path, asked)


def _heads() -> Iterator[str]:
    """Yield the bytes that are planned for the heads of the bundled target, as that is quantized."""
    yield from ("", "## heads of the bundled target")
    for kind in ("eagle", "block", "medusa"):
        for asked in (*_ASKED[:2], *_ASKED[3:5]):
            target = model_memory(BUNDLED_TARGET, **asked)
            found = head_memory(SHIPPED_HEADS / kind / BUNDLED_TARGET, target, BUNDLED_TARGET)
            sizes = f"{found.weights}, loading {found.loading}, page {found.page_nbytes}"
            yield f"{kind}, {_asked(asked)} = {found.number_format}: {sizes}"


def _blocks(title: str, path: Path, asked: tuple[dict[str, Any], ...]) -> Iterator[str]:
    """Yield what each answer to a request keeps, those that keep the same once."""
    yield from ("", f"## {title}")
    told: dict[str, str] = {}
    for each in asked:
        name = _asked(each)
        planned, model = model_memory(path, **each), load_untried(path, **each)
        yield f"{name} = {planned.number_format}: {planned.weights}, loading {planned.loading}, {_quantize(model)}"
        kept = "\n".join(f"  {line}" for line in _kept(model))
        if kept in told.values():
            yield f"  as {next(other for other, text in told.items() if text == kept)}"
        else:
            told[name] = kept
            yield kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNELS_VARIABLE, REFERENCE)
        for each in (each for each in asked if not each.keys() & {"kv_cache_dtype"}):
            key = f"{BITS}planned by PyTorch, {_asked(each)}, {torch_key()}"
            if is_read(key):
                planned = model_memory(path, **each)
                yield f"{key} = {planned.number_format}: {planned.weights}, loading {planned.loading}"


def _kept(model: Any) -> Iterator[str]:
    """Yield the products of a format on a line."""
    dump = Dump(model.decoder, Sources({}), is_brief=True)
    outer, by_form = dump.model(), defaultdict[str, list[str]](list)
    for name in ("embedding", "head"):
        by_form[_form(outer[name])].append(name)
    layers = [{name: _form(text) for name, text in layer.items() if _LINEAR.search(text)} for layer in dump.layers()]
    for name in sorted({name for layer in layers for name in layer}):
        forms = {index: layer[name] for index, layer in enumerate(layers) if name in layer}
        for form in sorted({*forms.values()}):
            places = [index for index, each in forms.items() if each == form]
            by_form[form].append(name if len(places) == len(forms) else f"{name} of {places}")
    for form in sorted(by_form):
        yield f"{form}: {' '.join(by_form[form])}"


def _form(text: str) -> str:
    """Return the text of a product without its shape."""
    return _LINEAR.sub(r"\1", text).removesuffix(" bias")


def _quantize(model: Any) -> str:
    return f"quantize {model.quantize}, cache {model.kv_cache_dtype}, page {model.pool.page_nbytes}"


def _asked(options: dict[str, Any]) -> str:
    named = [f"{name} {value}" for name, value in options.items() if name != "adapter"]
    return ", ".join(named) or "nothing asked"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of rounded weights out of what the tests print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


KINDS: Mapping[str, Callable[[Path], Iterator[str]]] = {"gguf": _gguf, "folders": _folders, "published": _published}
