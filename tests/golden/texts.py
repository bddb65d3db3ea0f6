"""The texts of the golden files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from families import DESCRIBED
from forerun import LLM, SamplingParams
from forerun.config import KERNELS_VARIABLE, REFERENCE
from forerun.drafters import DRAFTERS
from forerun.models import Rows
from forerun.models.loading.source import find_source
from forerun.models.memory_plan import model_memory
from gguf_models import TEXT
from golden import formats, meaning, models, options, speculation
from golden.processor import BITS, common, computing_with, is_read, processor, there, torch_key
from golden.sources import Numbers, Sources, digest
from golden.structures import Dump

Layers = Sequence[Mapping[str, str]]
_NUM_TOKENS = 8


def family(name: str) -> str:
    """Return the text of a family: Transformers' default configuration, and a tiny model."""
    lines = [f"# {name}", "", "## spec of Transformers' default configuration"]
    lines += list(_spec(models.default_config(name)))
    lines += ["", "## spec of a tiny model", *_spec(models.tiny_config(name))]
    with TemporaryDirectory() as folder:
        tensors = models.save_family(name, Path(folder))
        lines += list(_loaded(Path(folder), tensors, ("int8", "int4")))
    return "\n".join(lines) + "\n"


def architecture(name: str) -> str:
    """Return the text of an architecture of GGUF files, for each family that is written so."""
    lines = [f"# {name}"]
    for each in models.written_of(name):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "it.gguf"
            tensors = models.save_gguf(name, each, path)
            config = find_source(path).plain_config()
            lines += ["", f"## configuration of a file of {each}", *_configuration(config)]
            lines += ["", f"## spec of a file of {each}", *_spec(config)]
            lines += list(_loaded(path, tensors, ()))
            blocks = Path(folder) / "blocks.gguf"
            models.save_gguf(name, each, blocks, "Q8_0")
            lines += list(_brief("Q8_0", blocks, {}))
    return "\n".join(lines) + "\n"


def _configuration(config: Any) -> Iterator[str]:
    values = vars(config)
    for key in sorted(values):
        if not key.startswith("_"):
            yield f"{key} = {_sorted(values[key])}"


def _sorted(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_sorted(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_sorted, value)) + "]"
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def _spec(config: Any) -> Iterator[str]:
    model, layers = meaning.of_config(config)
    yield from _fields(model)
    yield from _layers(layers)


def _fields(found: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    for name in sorted(found):
        yield f"{prefix}{name} = {found[name]}"


def _layers(layers: Layers) -> Iterator[str]:
    """Yield each kind of layer once, by its differences from the most similar one before it."""
    kinds: dict[int, list[int]] = {}  # first layer of a kind -> layers
    for index, layer in enumerate(layers):
        first = next((first for first in kinds if layers[first] == layer), index)
        kinds.setdefault(first, []).append(index)
    for place, (first, alike) in enumerate(kinds.items()):
        told = list(kinds)[:place]
        base = min(told, key=lambda other: len(list(_difference(layers[other], layers[first]))), default=None)
        title = f"layers {_ranges(alike)}"
        difference = [] if base is None else list(_difference(layers[base], layers[first]))
        if base is None or 2 * len(difference) > len(layers[first]):
            yield f"{title}:"
            yield from _fields(layers[first], "  ")
        else:
            yield f"{title}, as layer {base} but:"
            yield from difference


def _difference(base: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*base, *other}):
        if base.get(name) != other.get(name):
            yield f"  {name} = {other[name]}" if name in other else f"  no {name}"


def _ranges(places: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _loaded(path: Path, tensors: Mapping[str, Numbers], quantized: Sequence[str]) -> Iterator[str]:
    """Yield what the kernels are given, what the model says, and its formats where it is quantized."""
    model = models.load_untried(path)
    dump = Dump(model.decoder, Sources(tensors))
    yield from ("", "## what the kernels are given", *_fields(dump.model()), *_layers(dump.layers()))
    yield from ("", "## bytes", *_bytes(path, model, {}), "", "## tokens and bits", *_said(model))
    yield from _reference(path)
    for form in quantized:
        yield from _brief(form, path, {"quantize": form})


def _brief(title: str, path: Path, options: dict[str, Any]) -> Iterator[str]:
    """Yield the formats of a quantized model."""
    model = models.load_untried(path, **options)
    dump = Dump(model.decoder, Sources({}), is_brief=True)
    linear = re.compile(r"\d+x\d+")
    head = {name: text for name, text in dump.model().items() if linear.search(text)}
    layers = [{name: text for name, text in layer.items() if linear.search(text)} for layer in dump.layers()]
    yield from ("", f"## {title}", *_fields(head), *_layers(layers))
    yield f"packed = {dump.packed_digest()}"
    yield from (*_bytes(path, model, options), *_said(model))


def _bytes(path: Path, model: Any, options: dict[str, Any]) -> Iterator[str]:
    planned = model_memory(path, **options)
    yield f"read in a step of one row = {model.decoder.weight_bytes}"
    yield f"planned = {planned.weights}, loading {planned.loading}, experts {planned.experts}"
    yield f"page = {planned.page_nbytes}, state {planned.state_nbytes}, format {planned.number_format}"


def _said(model: Any) -> Iterator[str]:
    """Yield a greedy answer, and digests of the logits of a text by instruction set."""
    params = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    with computing_with(common()):
        result: Any = LLM(model, None).generate([TEXT[:12]], [params])
    yield f"tokens = {' '.join(map(str, result[0].token_ids))}"
    for instructions in there():
        key = f"{BITS}{instructions}, {torch_key()}"
        if is_read(key):
            with computing_with(instructions):
                logits = model.forward([Rows(model.new_cache(), TEXT)]).logits
            yield f"{key} = {bits(logits)}"


def _reference(path: Path) -> Iterator[str]:
    """Yield the digest of the logits that PyTorch computes."""
    key = f"{BITS}reference, {processor()}, {torch_key()}"
    if not is_read(key):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNELS_VARIABLE, REFERENCE)
        model = models.load_untried(path)
    logits = model.forward([Rows(model.new_cache(), TEXT)]).logits
    yield f"{key} = {bits(logits)}"


def bits(logits: torch.Tensor) -> str:
    return digest(np.ascontiguousarray(logits.float().numpy()).tobytes())


FAMILIES = tuple(DESCRIBED)
ARCHITECTURES = tuple(models.architectures())
PACKAGES, VERSIONS = ("transformers", "gguf"), "versions"
FOLDER = Path(__file__).parent / "files"
TEXTS: Mapping[str, Callable[[], str]] = {
    **{f"families/{name}": lambda name=name: family(name) for name in FAMILIES},  # type: ignore[misc]
    **{f"architectures/{name}": lambda name=name: architecture(name) for name in ARCHITECTURES},  # type: ignore[misc]
    **{f"drafters/{name}": lambda name=name: speculation.drafter(name) for name in DRAFTERS},  # type: ignore[misc]
    **{f"formats/{kind}": lambda kind=kind: formats.text(kind) for kind in formats.KINDS},  # type: ignore[misc]
    "options": options.text,
}
"""Path below FOLDER without its ending -> what makes the text."""
