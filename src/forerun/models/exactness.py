"""Does a row's result depend on its company? Tried on every model at load, on this machine, and never assumed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from forerun.cache import SequenceCache
from forerun.errors import UnsupportedModelError
from forerun.models.general import GeneralDecoder
from forerun.models.model import Exactness, Model
from forerun.models.rows import Rows, lay_out

_PROMPT = 21
_NEW = 9


def probe(model: Model, num_layers: int) -> None:
    """Compute one step.

    Raises:
        UnsupportedModelError: not every layer calls our attention, so the model keeps another kind of state.
    """
    layout = lay_out([Rows(model.new_cache(), [0] * 5)], model.compute_dtype)
    with torch.inference_mode():
        model.decoder.forward(layout)
    if isinstance(model.decoder, GeneralDecoder) and len(layout.attended) != num_layers:
        raise UnsupportedModelError(
            f"{model.name} ({type(model.decoder.model).__name__}) cannot be served: "
            f"{num_layers - len(layout.attended)} of its {num_layers} layers do not compute attention through "
            "Transformers' attention interface."
        )


def self_test(model: Model) -> Exactness:
    """Compare the logits of rows computed one by one with the same rows computed together, and beside strangers."""
    tokens = _tokens(model, _PROMPT + _NEW)
    alone = _in_groups(model, tokens, (1,) * _NEW)
    trials = {
        "together": _in_groups(model, tokens, (9,)),
        "in twos": _in_groups(model, tokens, (2, 7)),
        "in fives": _in_groups(model, tokens, (5, 4)),
        "beside other sequences": _in_company(model, tokens),
    }
    for label, logits in trials.items():
        if not torch.equal(alone, logits):
            return Exactness(False, f"rows computed {label} differ in their last bits from rows alone: {_blame(model)}")
    return Exactness(True)


def _tokens(model: Model, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()


def _in_groups(model: Model, tokens: list[int], sizes: tuple[int, ...]) -> Tensor:
    """Logits of the last _NEW tokens, computed in forwards of these sizes after the same prompt."""
    cache = model.new_cache()
    _feed(model, cache, tokens[:_PROMPT])
    logits, done = [], _PROMPT
    for size in sizes:
        logits.append(model.forward([Rows(cache, tokens[done : done + size])]))
        cache.commit(range(size))
        done += size
    return torch.cat(logits)


def _in_company(model: Model, tokens: list[int]) -> Tensor:
    cache, stranger = model.new_cache(), model.new_cache()
    _feed(model, cache, tokens[:8])
    _feed(model, cache, tokens[8:_PROMPT])
    _feed(model, stranger, tokens[5:12])
    batch = [Rows(stranger, tokens[:3]), Rows(cache, tokens[_PROMPT:]), Rows(model.new_cache(), tokens[::-1])]
    return model.forward(batch)[3 : 3 + _NEW]


def _feed(model: Model, cache: SequenceCache, tokens: list[int]) -> None:
    model.forward([Rows(cache, tokens, num_logits=0)])
    cache.commit(range(len(tokens)))


def _blame(model: Model) -> str:
    """Name the first module that gives another result for the same row in other company."""
    if not isinstance(model.decoder, GeneralDecoder):
        return f"the lean decoder in {model.dtype} on this machine"
    inside = model.decoder.model
    tokens = _tokens(model, 7)
    few: dict[str, tuple[Tensor, Tensor]] = {}
    many: dict[str, tuple[Tensor, Tensor]] = {}
    for store, rows in ((few, tokens[:4]), (many, tokens)):
        with _recording(inside, store):
            model.forward([Rows(model.new_cache(), rows)])
    for name, (given, result) in few.items():
        if name not in many:
            continue
        other_given, other_result = many[name]
        if _same(given, other_given) and not _same(result, other_result):
            return f"{name} ({type(inside.get_submodule(name)).__name__})"
    return "no single module; the difference appears only across steps"


class _recording:
    """Keep the first tensor that goes into each leaf-most module, and the first that comes out."""

    def __init__(self, module: nn.Module, store: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.handles = [child.register_forward_hook(self._hook(name, store)) for name, child in module.named_modules()]

    @staticmethod
    def _hook(name: str, store: dict[str, tuple[Tensor, Tensor]]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[object, ...], result: object) -> None:
            out = result[0] if isinstance(result, tuple) else result
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                store.setdefault(name, (args[0].detach().clone(), out.detach().clone()))

        return hook

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _same(few: Tensor, many: Tensor) -> bool:
    """Whether the rows that both hold are the same bits. Rows lie in the first dimension of more than one entry."""
    few, many = (t.squeeze(0) if t.dim() > 2 else t for t in (few, many))
    rows = min(len(few), len(many), 4)
    return torch.equal(few[:rows], many[:rows])
