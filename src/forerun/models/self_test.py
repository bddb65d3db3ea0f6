"""The self-test of exactness: whether a row's result depends on the rows beside it.

Every model is tested at load, on the device it computes on, as long as its time lasts. Of native decoders, whose layers
are computed by the same kernels, as many layers are tried as show every kind of layer, and some outputs; what has
passed is not tried again by later loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from forerun import __version__
from forerun.errors import UnsupportedModelError
from forerun.kernels.partition import KV_BLOCK
from forerun.kv_cache import SequenceCache
from forerun.models.base import Exactness, Rows
from forerun.models.families.table import length_dependence
from forerun.models.fused.native import NativeDecoder
from forerun.models.model import Model, first_non_finite_tensor, has_finite_rows
from forerun.utils import machine
from forerun.utils.device import as_device_errors
from forerun.utils.files import EntryFile, file_digest, key_here
from forerun.utils.home import SELF_TESTS_STEM

if TYPE_CHECKING:
    from forerun.models.general import GeneralDecoder

_NATIVE_SECONDS = 0.5
_SECONDS = 2.0
"""Processor time of the calling thread after which no more trials begin, whatever else the machine does."""
_NATIVE_OUTPUTS = 2048
"""Outputs of the output layer that are tried, whose kernel computes blocks of 16."""
_NEW_ROWS = 16
_CROWD_ROWS = 70
_SHARE = 2**15
"""Numbers of a tensor from which PyTorch divides it among threads."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What has passed on this machine, kept for the next load of a model of the same shapes.

    Attributes:
        trials: their names.
        rows: that they computed.
        seconds: that they took.
    """

    trials: tuple[str, ...] = ()
    rows: int = 0
    seconds: float = 0.0

    @classmethod
    def restored(cls, state: Any) -> Passed:
        """Return an entry of its JSON value. Raises ValueError, TypeError or KeyError for one that is damaged."""
        trials = state["trials"]
        rows = state["rows"]
        seconds = state["seconds"]
        if not (isinstance(trials, list) and isinstance(rows, int) and isinstance(seconds, float)):
            raise TypeError
        return cls(tuple(map(str, trials)), rows, seconds)


FILE = EntryFile(SELF_TESTS_STEM, 1, "passed self-tests", Passed.restored, asdict)


class _Result(NamedTuple):
    """Rows as a trial has computed them.

    Attributes:
        rows: which of the tokens they are.
        places: where they stood in the last forward.
        logits: [rows, V].
    """

    rows: Sequence[int]
    places: Sequence[int]
    logits: Tensor


_Results = Generator[_Result, None, None]
_Trial = Callable[[], _Results]


def probe(model: Model) -> bool:
    """Compute one step, and return whether its logits are finite. This reads all weights of native decoders once.

    Raises:
        UnsupportedModelError: not every layer calls forerun's attention, so the model keeps another kind of state.
    """
    general = _general(model)
    if general is not None and len(general.layer_attentions) < general.num_layers:
        raise UnsupportedModelError(
            f"{model.name} ({type(general.model).__name__}) cannot be served: "
            f"{general.num_layers - len(general.layer_attentions)} of its {general.num_layers} layers do not compute "
            "attention through Transformers' attention interface."
        )
    cache = model.new_cache()
    logits = model.forward([Rows(cache, [0] * (1 if isinstance(model.decoder, NativeDecoder) else 5))]).logits
    cache.free()
    return has_finite_rows(logits)


@torch.inference_mode()
def self_test(model: Model, *, is_finite: bool = True) -> Exactness:
    """Compare the logits of rows computed together with the same rows computed one by one, in groups, beside other
    sequences, and on a path through a branching tree. The rows stand at a border of two blocks of keys; where modules
    are Transformers' own, also where the parts of two threads meet.

    Args:
        is_finite: what `probe` has found.

    Raises:
        DeviceError, DeviceMemoryError: the device that computes it fails, or has no memory left.
    """
    if not is_finite:
        return Exactness(False, _non_finite(model))
    general = _general(model)
    if general is not None and (reason := length_dependence(general.model.config)):
        return Exactness(False, reason)  # rows of long contexts are not tried
    if not isinstance(decoder := model.decoder, NativeDecoder):
        with as_device_errors(model.device):
            return _SelfTest(model, _SECONDS).run()[0]
    part = decoder.first_part(_NATIVE_OUTPUTS)
    key = _key(part, model.context_length)
    earlier = FILE.read().get(key, Passed())
    with as_device_errors(model.device):
        exactness, passed = _SelfTest(model, _NATIVE_SECONDS, part, earlier).run()
    if passed != earlier:
        FILE.put(key, passed)
    return exactness


def _key(decoder: NativeDecoder, context_length: int) -> str:
    """Return the key of all that decides whether the trials pass: the library, processor, instructions, threads, and
    the shapes and formats of the layers that are tried."""
    library = decoder.library
    with library.path.open("rb") as file:
        build = file_digest(file)
    parts = (build, library.instructions, library.shares_openmp, torch.get_num_threads(), context_length)
    versions = (__version__, torch.__version__, machine.model(), *machine.features())
    return key_here((*versions, *map(str, parts), str(decoder.shapes)))


def _general(model: Model) -> GeneralDecoder | None:
    """Return the decoder of a model whose modules are Transformers' own; None for all others."""
    return cast("GeneralDecoder", model.decoder) if model.kind == "general" else None


def _non_finite(model: Model) -> str:
    tensor = first_non_finite_tensor(model) or "a number computed from finite weights"
    return f"its logits are not finite: {tensor} is NaN or infinite"


class _SelfTest:
    """The trials of a model.

    Args:
        seconds: after which no more trials begin; one is made in any case.
        part: the decoder's layers and outputs that are tried; None: all.
        earlier: what has passed before.
    """

    def __init__(
        self, model: Model, seconds: float, part: NativeDecoder | None = None, earlier: Passed | None = None
    ) -> None:
        self._whole = model
        self._earlier = earlier or Passed()
        self._model = model if part is None else _model_of(model, part)
        self._start = time.thread_time()
        self._end = self._start + seconds
        self._num_rows = 0
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        generator = torch.Generator().manual_seed(0)
        self._tokens: list[int] = torch.randint(0, self._model.vocab_size, (_NEW_ROWS,), generator=generator).tolist()

    def run(self) -> tuple[Exactness, Passed]:
        """Make the trials that are left, while the time lasts. Returns the verdict, and what has passed so far, which
        is no more than before where rows differ."""
        trials = self._trials()
        left = {name: trial for name, trial in trials.items() if name not in self._earlier.trials}
        done: list[str] = []
        reason = None
        if left:
            self._cache = _prefilled(self._model)
            try:
                reason = self._reason(left, done)
            finally:
                self._cache.free()
        passed = Passed(
            (*self._earlier.trials, *done),
            self._earlier.rows + self._num_rows,
            self._earlier.seconds + round(time.thread_time() - self._start if left else 0.0, 3),
        )
        tried = (
            f"{self._model.num_layers} of {self._whole.num_layers} layers and {self._model.vocab_size:,} of "
            f"{self._whole.vocab_size:,} outputs, {passed.rows:,} rows in {passed.seconds:.2f} s"
        )
        if reason is not None:
            return Exactness(False, reason, tried), self._earlier
        if len(passed.trials) < len(trials):
            tried += f"; the time was over after {len(passed.trials)} of {len(trials)} trials"
        return Exactness(True, None, tried if left else f"{tried}; remembered from an earlier load"), passed

    def _reason(self, trials: dict[str, _Trial], done: list[str]) -> str | None:
        """Make the trials, and return why the model is not exact, or None.

        Args:
            done: gets the names of those that have passed.
        """
        together = self._logits([Rows(self._cache, self._tokens)])
        self._cache.drop()
        if not has_finite_rows(together):
            return _non_finite(self._whole)
        for name, trial in trials.items():
            with closing(trial()) as results:
                equal = (torch.equal(together[list(each.rows)], each.logits) for each in results)
                index = next((index for index, is_equal in enumerate(equal) if not is_equal), None)
            if index is not None:
                found = self._blame(trial, index)
                return f"rows computed {name} differ in their last bits from rows computed together: {found}"
            done.append(name)
            if time.thread_time() >= self._end:
                break
        return None

    def _logits(self, batch: Sequence[Rows]) -> Tensor:
        self._num_rows += sum(len(rows.token_ids) for rows in batch)
        self._seen.clear()
        return self._model.forward(batch).logits

    def _trials(self) -> dict[str, _Trial]:
        """Return ways to compute the tokens' logits, by name: those that have found most come first."""
        alone = {f"alone (row {row})": partial(self._alone, row) for row in (15, 8, 7, 0)}
        trials: dict[str, _Trial] = {
            "in groups": partial(self._in_groups, (2, 5, 9)),
            "beside other sequences": self._beside_others,
            "in a branching tree": self._in_a_tree,
            **alone,
        }
        if isinstance(self._model.decoder, NativeDecoder):
            return trials
        if _general(self._model) is not None:
            trials = dict(self._trials_of_threads()) | trials
        most = self._model.context_length
        threads = torch.get_num_threads()
        trials["in a forward of many rows"] = partial(self._in_a_crowd, min(_CROWD_ROWS, most), 0, threads)
        trials["in eights"] = partial(self._in_groups, (8, 8))
        others = {f"alone (row {row})": partial(self._alone, row) for row in reversed(range(_NEW_ROWS))}
        return {"in groups": trials["in groups"], **trials, **others}

    def _trials_of_threads(self) -> Iterator[tuple[str, _Trial]]:
        """Yield trials whose rows stand where the parts of three threads meet, or end."""
        width = self._model.embedding_rows(torch.tensor([0])).shape[-1]
        count = min(max(_NEW_ROWS, 2 * _SHARE // width), self._model.context_length)
        for part in (3, 2, 1):
            place = min(count, max(0, (count + _NEW_ROWS) // part - _NEW_ROWS // 2))
            num_threads = max(3, torch.get_num_threads()) - 3 + part
            trial = partial(self._in_a_crowd, place, count - place, num_threads)
            yield f"by {num_threads} threads after {place} of {count} other rows", trial

    def _alone(self, row: int) -> _Results:
        """Compute one row after those before it."""
        cache = self._cache
        if cache.state is None:
            cache.feed(range(-1, row - 1))  # their keys and values lie there: every trial writes the same
        elif row:
            self._logits([Rows(cache, self._tokens[:row], num_logits=0)])
        cache.commit(range(row))
        try:
            yield _Result([row], [0], self._logits([Rows(cache, [self._tokens[row]])]))
        finally:
            cache.truncate(cache.length - row)

    def _in_groups(self, sizes: Sequence[int]) -> _Results:
        """Compute the rows in forwards of these sizes."""
        length = self._cache.length
        borders = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
        try:
            for first, last in pairwise(borders):
                logits = self._logits([Rows(self._cache, self._tokens[first:last])])
                self._cache.commit(range(last - first))
                yield _Result(range(first, last), range(last - first), logits)
        finally:
            self._cache.truncate(length)

    def _beside_others(self) -> _Results:
        model = self._model
        tokens = self._tokens
        others = model.new_cache(), model.new_cache()
        try:
            self._logits([Rows(others[0], tokens[2:], num_logits=0)])
            others[0].commit(range(len(tokens) - 2))
            batch = [Rows(others[0], tokens[:3]), Rows(self._cache, tokens), Rows(others[1], tokens[::-1] * 2)]
            places = range(3, 3 + _NEW_ROWS)
            yield _Result(range(_NEW_ROWS), places, self._logits(batch)[3 : 3 + _NEW_ROWS])
        finally:
            self._cache.drop()
            for cache in others:
                cache.free()

    def _in_a_crowd(self, before: int, after: int, num_threads: int) -> _Results:
        """Compute the rows between so many rows of prompts: some kernels change with the number of rows only beyond a
        few dozen, and others with a row's place in its thread's part."""
        prompts = [
            Rows(self._model.new_cache(), (self._tokens * count)[:count], num_logits=0) for count in (before, after)
        ]
        batch = [prompts[0], Rows(self._cache, self._tokens), prompts[1]]
        threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            logits = self._logits([rows for rows in batch if len(rows.token_ids)])
            yield _Result(range(_NEW_ROWS), range(before, before + _NEW_ROWS), logits)
        finally:
            torch.set_num_threads(threads)
            self._cache.drop()
            for rows in prompts:
                rows.cache.free()

    def _in_a_tree(self) -> _Results:
        """Compute all rows but the last two as a path through a tree in which each has a sibling, one with a child of
        its own; then commit the path, and compute the last two after it."""
        depth = _NEW_ROWS - 2
        tokens = self._tokens
        length = self._cache.length
        nodes = [tokens[0]]
        parents = [-1]
        path = [0]
        for token_id in tokens[1:depth]:
            nodes += [tokens[-1], token_id]
            parents += [path[-1], path[-1]]
            path.append(len(nodes) - 1)
        nodes.append(tokens[0])
        parents.append(1)
        try:
            yield _Result(range(depth), path, self._logits([Rows(self._cache, nodes, parents)])[path])
            self._cache.commit(path)
            yield _Result(range(depth, _NEW_ROWS), range(2), self._logits([Rows(self._cache, tokens[depth:])]))
        finally:
            self._cache.truncate(length)

    def _blame(self, trial: _Trial, index: int) -> str:
        """Name the first module that gives another result for the same rows in the trial's result `index`."""
        model = self._whole
        general = _general(model)
        if general is None:
            return f"the fused decoder in {model.quantize or model.dtype} on this {model.device.type}"
        inside = general.model
        with _recording(inside, self._seen):
            with closing(trial()) as results:
                result = next(each for count, each in enumerate(results) if count == index)
                other = dict(self._seen)
            self._logits([Rows(self._cache, self._tokens)])
            self._cache.drop()
        for name, (given, output) in self._seen.items():
            if name not in other:
                continue
            other_given, other_output = other[name]
            if _same(given, other_given, result) and not _same(output, other_output, result):
                return f"{name} ({type(inside.get_submodule(name)).__name__})"
        return "no single module; the difference appears only across steps"


def _model_of(model: Model, part: NativeDecoder) -> Model:
    """Return a model of a part of the decoder."""
    return Model(
        part,
        name=model.name,
        vocab_size=part.num_outputs,
        context_length=model.context_length,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        device=model.device,
        num_parameters=model.num_parameters,
        kind=model.kind,
    )


def _prefilled(model: Model) -> SequenceCache:
    """Return a cache with a random prefix: any keys and values will do, and drawn ones cost next to nothing. Half of
    the new rows stand before the border of a block, if the context reaches that far."""
    cache = model.new_cache()
    length = max(0, min(KV_BLOCK - _NEW_ROWS // 2, model.context_length - _NEW_ROWS))
    if cache.state is not None:  # states are not drawn: they come of rows
        model.forward([Rows(cache, [token_id % model.vocab_size for token_id in range(length)], num_logits=0)])
        cache.commit(range(length))
        cache.mark()
        return cache
    cache.feed(range(-1, length - 1))
    for layer, (heads, *widths) in enumerate(cache.shapes):
        generator = torch.Generator().manual_seed(1)
        dtype = cache.dtype if cache.dtype.is_floating_point else torch.float32  # it quantizes what is written
        keys, values = (torch.randn(heads, length, n, generator=generator, dtype=dtype) for n in widths)
        cache.write(layer, 0, keys, values)
    cache.commit(range(length))
    return cache


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


def _same(together: Tensor, other: Tensor, result: _Result) -> bool:
    """Return whether the rows of a result are the same bits in a tensor of all tokens and in that of the result's
    forward. Rows lie in the first dimension of more than one entry."""
    together, other = (t.squeeze(0) if t.dim() > 2 else t for t in (together, other))
    places = result.places
    if len(other) <= max(places):  # rows whose logits are not returned have been left out
        places = range(len(places))
    if len(together) <= max(result.rows) or len(other) <= max(places):
        return False
    return torch.equal(together[list(result.rows)], other[list(places)])
