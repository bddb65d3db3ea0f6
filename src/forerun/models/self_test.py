"""The self-test of exactness: whether a row's result depends on the rows beside it.

Every model is tested at load, on the device it computes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from forerun.errors import UnsupportedModelError
from forerun.kernels.partition import KV_BLOCK
from forerun.kv_cache import SequenceCache
from forerun.models.base import Exactness, Rows
from forerun.models.general import GeneralDecoder
from forerun.models.model import Model
from forerun.models.non_finite import first_non_finite_tensor, has_finite_rows
from forerun.utils.device import as_device_errors

_NEW_ROWS = 16
_CROWD_ROWS = 70


def probe(model: Model) -> bool:
    """Compute one step, and return whether its logits are finite.

    Raises:
        UnsupportedModelError: not every layer calls forerun's attention, so the model keeps another kind of state.
    """
    decoder = model.decoder
    if isinstance(decoder, GeneralDecoder) and len(decoder.layer_attentions) < decoder.num_layers:
        raise UnsupportedModelError(
            f"{model.name} ({type(decoder.model).__name__}) cannot be served: "
            f"{decoder.num_layers - len(decoder.layer_attentions)} of its {decoder.num_layers} layers do not compute "
            "attention through Transformers' attention interface."
        )
    cache = model.new_cache()
    logits = model.forward([Rows(cache, [0] * 5)]).logits
    cache.free()
    return has_finite_rows(logits)


@torch.inference_mode()
def self_test(model: Model) -> Exactness:
    """Compare the logits of rows computed one by one with the same rows computed together, beside other sequences, and
    on a path through a branching tree. The rows stand at a border of two blocks of keys.

    Raises:
        DeviceError, DeviceMemoryError: the device that computes it fails, or has no memory left.
    """
    with as_device_errors(model.device):
        cache = _prefilled(model)
        try:
            return _tried(model, cache)
        finally:
            cache.free()


def _tried(model: Model, cache: SequenceCache) -> Exactness:
    tokens = _tokens(model, _NEW_ROWS)
    alone = _in_groups(model, cache, tokens, (1,) * _NEW_ROWS)
    if not has_finite_rows(alone):
        tensor = first_non_finite_tensor(model) or "a number computed from finite weights"
        return Exactness(False, f"its logits are not finite: {tensor} is NaN or infinite")
    trials: dict[str, Callable[[], Tensor]] = {
        "together": lambda: _in_groups(model, cache, tokens, (_NEW_ROWS,)),
        "in twos, fives and nines": lambda: _in_groups(model, cache, tokens, (2, 5, 9)),
        "in eights": lambda: _in_groups(model, cache, tokens, (8, 8)),
        "in a forward of many rows": lambda: _in_a_crowd(model, cache, tokens),
        "beside other sequences": lambda: _beside_others(model, cache, tokens),
        "in a branching tree": lambda: _in_a_tree(model, cache, tokens),
    }
    for label, trial in trials.items():
        if not torch.equal(alone, trial()):
            return Exactness(False, f"rows computed {label} differ in their last bits from rows alone: {_blame(model)}")
    return Exactness(True)


def _tokens(model: Model, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()


def _prefilled(model: Model) -> SequenceCache:
    """Return a cache with a random prefix: any keys and values will do, and drawn ones cost next to nothing. Half of
    the new rows stand before the border of a block, if the context reaches that far."""
    cache = model.new_cache()
    generator = torch.Generator().manual_seed(1)
    length = max(0, min(KV_BLOCK - _NEW_ROWS // 2, model.context_length - _NEW_ROWS))
    cache.feed(range(-1, length - 1))
    for layer, (heads, *widths) in enumerate(cache.shapes):
        keys, values = (torch.randn(heads, length, n, generator=generator, dtype=cache.dtype) for n in widths)
        cache.write(layer, 0, keys, values)
    cache.commit(range(length))
    return cache


def _in_groups(model: Model, cache: SequenceCache, tokens: list[int], sizes: tuple[int, ...]) -> Tensor:
    """Return the logits of the tokens, computed in forwards of these sizes after the cache's prefix, which the cache
    returns to."""
    logits, done, length = [], 0, cache.length
    for size in sizes:
        logits.append(model.forward([Rows(cache, tokens[done : done + size])]).logits)
        cache.commit(range(size))
        done += size
    cache.truncate(length)
    return torch.cat(logits)


def _beside_others(model: Model, cache: SequenceCache, tokens: list[int]) -> Tensor:
    other = model.new_cache()
    model.forward([Rows(other, tokens[2:], num_logits=0)])
    other.commit(range(len(tokens) - 2))
    batch = [Rows(other, tokens[:3]), Rows(cache, tokens), Rows(model.new_cache(), tokens[::-1] * 2)]
    logits = model.forward(batch).logits[3 : 3 + _NEW_ROWS]
    cache.drop()
    for rows in batch:
        if rows.cache is not cache:
            rows.cache.free()
    return logits


def _in_a_crowd(model: Model, cache: SequenceCache, tokens: list[int]) -> Tensor:
    """Compute the tokens beside a prompt chunk: some kernels change with the number of rows only beyond a few dozen."""
    prompt = Rows(model.new_cache(), (tokens * _CROWD_ROWS)[: min(_CROWD_ROWS, model.context_length)], num_logits=0)
    logits = model.forward([prompt, Rows(cache, tokens)]).logits
    prompt.cache.free()
    cache.drop()
    return logits


def _in_a_tree(model: Model, cache: SequenceCache, tokens: list[int]) -> Tensor:
    """Compute all tokens but the last two as a path through a tree in which each has a sibling, one with a child of its
    own; then commit the path, and compute the last two after it."""
    depth, length = _NEW_ROWS - 2, cache.length
    nodes, parents, path = [tokens[0]], [-1], [0]
    for token_id in tokens[1:depth]:
        nodes += [tokens[-1], token_id]
        parents += [path[-1], path[-1]]
        path.append(len(nodes) - 1)
    nodes.append(tokens[0])
    parents.append(1)
    logits = [model.forward([Rows(cache, nodes, parents)]).logits[path]]
    cache.commit(path)
    logits.append(model.forward([Rows(cache, tokens[depth:])]).logits)
    cache.truncate(length)
    return torch.cat(logits)


def _blame(model: Model) -> str:
    """Name the first module that gives another result for the same row beside other rows."""
    if not isinstance(model.decoder, GeneralDecoder):
        return f"the Llama decoder in {model.quantize or model.dtype} on this {model.device.type}"
    inside = model.decoder.model
    tokens = _tokens(model, 7)
    few: dict[str, tuple[Tensor, Tensor]] = {}
    many: dict[str, tuple[Tensor, Tensor]] = {}
    for store, rows in ((few, tokens[:4]), (many, tokens)):
        with _recording(inside, store):
            cache = model.new_cache()
            model.forward([Rows(cache, rows)])
            cache.free()
    for name, (given, result) in few.items():
        if name not in many:
            continue
        other_given, other_result = many[name]
        if _same(given, other_given) and not _same(result, other_result):
            return f"{name} ({type(inside.get_submodule(name)).__name__})"
    return "no single module; the difference appears only across steps"


@contextmanager
def _recording(module: nn.Module, store: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Keep the first tensor that goes into each leaf-most module, and the first that comes out."""

    def hook(name: str, _: nn.Module, args: tuple[object, ...], result: object) -> None:
        out = result[0] if isinstance(result, tuple) else result
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            store.setdefault(name, (args[0].detach().clone(), out.detach().clone()))

    handles = [child.register_forward_hook(partial(hook, name)) for name, child in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _same(few: Tensor, many: Tensor) -> bool:
    """Return whether the rows that both hold are the same bits. Rows lie in the first dimension of more than one
    entry."""
    few, many = (t.squeeze(0) if t.dim() > 2 else t for t in (few, many))
    rows = min(len(few), len(many), 4)
    return torch.equal(few[:rows], many[:rows])
