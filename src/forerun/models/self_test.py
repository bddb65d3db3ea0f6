"""The self-test of exactness: whether a row's result depends on the rows beside it.

Every model is tested at load, on the device it computes on. Of native decoders, whose layers are computed by the same
kernels, as many layers are tried as show every kind of layer, and the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from forerun.errors import UnsupportedModelError
from forerun.kernels.partition import KV_BLOCK
from forerun.kv_cache import SequenceCache
from forerun.models.base import Exactness, Rows
from forerun.models.general import GeneralDecoder
from forerun.models.llama.native import NativeLlamaDecoder
from forerun.models.model import Model
from forerun.models.non_finite import first_non_finite_tensor, has_finite_rows
from forerun.utils.device import as_device_errors

_NEW_ROWS = 16
_CROWD_ROWS = 70
_SHARE = 2**15
"""Numbers of a tensor from which PyTorch divides it among threads."""


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


def _num_tried(model: Model) -> int:
    decoder = model.decoder
    return decoder.num_varied_layers if isinstance(decoder, NativeLlamaDecoder) else model.num_layers


def _logits(model: Model, batch: Sequence[Rows]) -> Tensor:
    """Compute the batch through the layers that are tried. Returns [sum of num_logits, V]."""
    count = _num_tried(model)
    return model.forward(batch).logits if count == model.num_layers else model.forward_first(batch, count)[1]


@torch.inference_mode()
def self_test(model: Model) -> Exactness:
    """Compare the logits of rows computed one by one with the same rows computed together, beside other sequences, and
    on a path through a branching tree. The rows stand at a border of two blocks of keys; where modules are
    Transformers' own, also where the parts of two threads meet.

    Raises:
        DeviceError, DeviceMemoryError: the device that computes it fails, or has no memory left.
    """
    with as_device_errors(model.device):
        cache = _prefilled(model)
        try:
            found, count = _tried(model, cache), _num_tried(model)
            return replace(found, tried=f"{count} of {model.num_layers} layers, and the output layer")
        finally:
            cache.free()


def _tried(model: Model, cache: SequenceCache) -> Exactness:
    tokens = _tokens(model, _NEW_ROWS)
    alone = _in_groups(model, cache, tokens, (1,) * _NEW_ROWS)
    if not has_finite_rows(alone):
        tensor = first_non_finite_tensor(model) or "a number computed from finite weights"
        return Exactness(False, f"its logits are not finite: {tensor} is NaN or infinite")
    for label, (trial, place) in _trials(model, cache, tokens).items():
        if not torch.equal(alone, trial()):
            groups = partial(_in_groups, model, cache, tokens)
            few, many = (
                (partial(groups, (4,)), partial(groups, (7,))) if place == 0 else (partial(groups, (_NEW_ROWS,)), trial)
            )
            reason = _blame(model, few, many, place)
            return Exactness(False, f"rows computed {label} differ in their last bits from rows alone: {reason}")
    return Exactness(True)


def _trials(model: Model, cache: SequenceCache, tokens: list[int]) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """Return ways to compute the tokens' logits: label -> (the way, rows before theirs in its first forward)."""
    groups, crowd = partial(_in_groups, model, cache, tokens), partial(_in_a_crowd, model, cache, tokens)
    most, threads = model.context_length, torch.get_num_threads()
    trials: dict[str, tuple[Callable[[], Tensor], int]] = {
        "together": (partial(groups, (_NEW_ROWS,)), 0),
        "in twos, fives and nines": (partial(groups, (2, 5, 9)), 0),
        "in eights": (partial(groups, (8, 8)), 0),
        "in a forward of many rows": (partial(crowd, min(_CROWD_ROWS, most), 0, threads), min(_CROWD_ROWS, most)),
        "beside other sequences": (partial(_beside_others, model, cache, tokens), 3),
        "in a branching tree": (partial(_in_a_tree, model, cache, tokens), 0),
    }
    if isinstance(model.decoder, GeneralDecoder):
        width = model.embedding_rows(torch.tensor([0])).shape[-1]
        count = min(max(_NEW_ROWS, 2 * _SHARE // width), most)  # enough for three threads
        for part in (1, 2, 3):
            place = min(count, max(0, (count + _NEW_ROWS) // part - _NEW_ROWS // 2))
            num_threads = max(3, threads) - 3 + part
            trial = partial(crowd, place, count - place, num_threads)
            trials[f"by {num_threads} threads after {place} of {count} other rows"] = trial, place
    return trials


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
    for layer, (heads, *widths) in enumerate(cache.shapes[: _num_tried(model)]):
        dtype = cache.dtype if cache.dtype.is_floating_point else torch.float32  # it quantizes what is written
        keys, values = (torch.randn(heads, length, n, generator=generator, dtype=dtype) for n in widths)
        cache.write(layer, 0, keys, values)
    cache.commit(range(length))
    return cache


def _in_groups(model: Model, cache: SequenceCache, tokens: list[int], sizes: tuple[int, ...]) -> Tensor:
    """Return the logits of the tokens, computed in forwards of these sizes after the cache's prefix, which the cache
    returns to."""
    logits, done, length = [], 0, cache.length
    for size in sizes:
        logits.append(_logits(model, [Rows(cache, tokens[done : done + size])]))
        cache.commit(range(size))
        done += size
    cache.truncate(length)
    return torch.cat(logits)


def _beside_others(model: Model, cache: SequenceCache, tokens: list[int]) -> Tensor:
    other = model.new_cache()
    _logits(model, [Rows(other, tokens[2:], num_logits=0)])
    other.commit(range(len(tokens) - 2))
    batch = [Rows(other, tokens[:3]), Rows(cache, tokens), Rows(model.new_cache(), tokens[::-1] * 2)]
    logits = _logits(model, batch)[3 : 3 + _NEW_ROWS]
    cache.drop()
    for rows in batch:
        if rows.cache is not cache:
            rows.cache.free()
    return logits


def _in_a_crowd(
    model: Model, cache: SequenceCache, tokens: list[int], before: int, after: int, num_threads: int
) -> Tensor:
    """Compute the tokens between so many rows of prompts: some kernels change with the number of rows only beyond a few
    dozen, and others with a row's place in its thread's part."""
    batch = [Rows(model.new_cache(), (tokens * count)[:count], num_logits=0) for count in (before, after)]
    batch.insert(1, Rows(cache, tokens))
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = _logits(model, [rows for rows in batch if len(rows.token_ids)])
    finally:
        torch.set_num_threads(threads)
        batch[0].cache.free()
        batch[2].cache.free()
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
    logits = [_logits(model, [Rows(cache, nodes, parents)])[path]]
    cache.commit(path)
    logits.append(_logits(model, [Rows(cache, tokens[depth:])]))
    cache.truncate(length)
    return torch.cat(logits)


def _blame(model: Model, compute_few: Callable[[], object], compute_many: Callable[[], object], place: int) -> str:
    """Name the first module that gives another result for the same rows. They come after `place` others in the second
    computation."""
    if not isinstance(model.decoder, GeneralDecoder):
        return f"the Llama decoder in {model.quantize or model.dtype} on this {model.device.type}"
    inside = model.decoder.model
    few: dict[str, tuple[Tensor, Tensor]] = {}
    many: dict[str, tuple[Tensor, Tensor]] = {}
    for store, compute in ((few, compute_few), (many, compute_many)):
        with _recording(inside, store):
            compute()
    for name, (given, result) in few.items():
        if name not in many:
            continue
        other_given, other_result = many[name]
        if _same(given, other_given, place) and not _same(result, other_result, place):
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


def _same(few: Tensor, many: Tensor, place: int) -> bool:
    """Return whether the rows that both hold are the same bits, after `place` others in the second. Rows lie in the
    first dimension of more than one entry."""
    few, many = (t.squeeze(0) if t.dim() > 2 else t for t in (few, many))
    rows = min(len(few), len(many) - place)
    return torch.equal(few[:rows], many[place : place + rows])
