"""The decoder of any Transformers decoder-only model: its own modules with forerun's attention and packed linear
layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from forerun.errors import UnsupportedModelError
from forerun.kernels.partition import AttentionShape
from forerun.kernels.torch.elementwise import SameAtEveryPlace
from forerun.models.attention.base import ATTENTION_NAME, AttentionBackend, LayerAttention, Layout
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.base import HiddenStateOutputs
from forerun.models.draft_session import DraftSession, Pick
from forerun.models.linear import Linear, Maker, module_tensors, pack_module
from forerun.types import Cache

_ALLOWED_OPTIONS = {
    *("sliding_window", "softcap", "s_aux"),
    # options that do not change the attention of a decoder at inference
    "position_ids",
    "position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "use_cache",
    "is_causal",
    "cache_position",
    "past_key_values",
    "cache",
    "num_items_in_batch",
    "return_dict",
    "target_dtype",
    "head_mask",
    "layer_past",
}


class Attend(Protocol):
    """`Attention.forward` of one forward's layout."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, form: AttentionShape) -> Tensor: ...


_attend: ContextVar[Attend] = ContextVar("attend")
"""The attention of the current forward. It is not passed through the model's modules: some drop unknown arguments."""


def forerun_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention in the form Transformers calls. query: [1, H, T, D]; key, value: [1, H_kv, T, D] -> [1, T, H,
    D_v].

    Raises:
        UnsupportedModelError: the model passes an option that `AttentionBackend` does not support.
    """
    for name, option in options.items():
        if option is not None and name not in _ALLOWED_OPTIONS:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes its attention the option {name!r}, which forerun does not support. "
                "Serve this model with Transformers, or report the architecture."
            )
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    form = AttentionShape(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )
    packed = (each[0].transpose(0, 1).to(compute_dtype) for each in (query, key, value))
    attended = _attend.get()(int(module.layer_idx), *packed, form=form)  # type: ignore[arg-type]
    return attended.view(1, query.shape[2], query.shape[1], -1), None


def register_attention() -> None:
    """Register `forerun_attention` with Transformers. Before this call, nothing of Transformers' models is imported."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, forerun_attention)


class GeneralDecoder:
    """A Transformers model with forerun's attention, loaded with attn_implementation=ATTENTION_NAME.

    Args:
        model: the loaded causal language model, on its device. It gets other linear layers.
        maker: of these; None: the weights stay floats.
        attention: None: the PyTorch reference.

    Attributes:
        layer_attentions: of the layers that compute attention through Transformers' interface, in order. Five rows
            are sent through the model to see them.
    """

    num_experts_read = 0

    def __init__(self, model: Any, maker: Maker | None = None, attention: AttentionBackend | None = None) -> None:
        pack_module(model, maker, model.get_output_embeddings())
        self.model = model
        self.num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self.attention = ReferenceAttention(model.dtype) if attention is None else attention
        recorder = _AttentionRecorder(model.dtype)
        positions = torch.arange(5, device=model.device)
        with torch.inference_mode(), _functions_of_single_numbers_replaced(model):
            self._run(torch.zeros_like(positions), positions, 0, recorder)
        self.layer_attentions = [recorder.layers[index] for index in sorted(recorder.layers)]
        self.planner = self.attention.planner(self.layer_attentions, model.device)

    def forward(self, layout: Layout, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Return logits of the requested rows, [R, V] with R >= layout.num_logits, and the states that enter `layers`
        (`Decoder.forward`)."""
        keep: Tensor | int = 0 if layout.logit_rows is None else layout.logit_rows
        hidden_outputs = HiddenStateOutputs(layers, layout)
        handles = [self._register_hook(layer, hidden_outputs) for layer in layers]
        try:
            logits = self._run(layout.token_ids, layout.positions, keep, partial(self.attention.forward, layout=layout))
        finally:
            for handle in handles:
                handle.remove()
        return logits, hidden_outputs.stacked()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the model by the names of its modules (`NamedTensors`)."""
        return module_tensors(self.model)

    def _run(self, token_ids: Tensor, positions: Tensor, keep: Tensor | int, attend: Attend) -> Tensor:
        """Run the model. token_ids, positions: [T] -> [rows kept, V]."""
        token = _attend.set(attend)
        try:
            output = self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep
            )
        finally:
            _attend.reset(token)
        logits: Tensor = output.logits[0]
        return logits

    def _register_hook(self, layer: int, hidden_outputs: HiddenStateOutputs) -> RemovableHandle:
        """Register a hook that stores what enters a layer or, for layer `num_layers`, what leaves the final norm; some
        models scale that for their output layer."""
        if layer == self.num_layers:
            decoder: nn.Module = self.model.get_decoder()
            return decoder.register_forward_hook(lambda *call: hidden_outputs.take(layer, call[-1][0][0]))

        def hook(_: nn.Module, args: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
            hidden_outputs.take(layer, (args[0] if args else options["hidden_states"])[0])

        handle: RemovableHandle = self._layers()[layer].register_forward_pre_hook(hook, with_kwargs=True)
        return handle

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        """Return None: the general decoder has no draft session (`LanguageModel.draft_session`)."""
        return None

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32 (`Decoder.embedding_rows`)."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight[token_ids].detach().float()

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32 (`Decoder.output_rows`)."""
        module = self._output_layer()
        if isinstance(module, nn.Linear):
            return module.weight[token_ids].detach().float()
        return cast(Linear, module).rows(token_ids)

    def _output_layer(self) -> nn.Module:
        module: nn.Module | None = self.model.get_output_embeddings()
        if module is None:
            raise UnsupportedModelError(f"{type(self.model).__name__} does not say which module is its output layer.")
        return module

    def _layers(self) -> nn.ModuleList:
        """Return the decoder's layers: the outermost list whose modules number their attention as this decoder does."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers and _are_counted(module):
                return module
        raise UnsupportedModelError(
            f"{type(self.model).__name__} keeps its layers in no list of {self.num_layers} modules, so hidden states "
            "between them cannot be handed out. Take a drafter that needs none."
        )


@contextmanager
def _functions_of_single_numbers_replaced(model: nn.Module) -> Iterator[None]:
    """Replace PyTorch's functions of single numbers by forerun's, in the modules that turn out to call them.

    Elsewhere they are not looked for: that would cost every operation a microsecond or more.
    """
    within: list[nn.Module] = []
    callers: set[nn.Module] = set()
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda entered, _: within.append(entered)))
        handles.append(module.register_forward_hook(lambda *_: within.__delitem__(-1)))
    try:
        with SameAtEveryPlace(lambda: callers.add(within[-1])):
            yield
    finally:
        for handle in handles:
            handle.remove()
    for module in callers if next(model.parameters()).device.type == "cpu" else ():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


_same_at_every_place: Any = SameAtEveryPlace()


def _enter(*_: object) -> None:
    _same_at_every_place.__enter__()


def _leave(*_: object) -> None:
    _same_at_every_place.__exit__(None, None, None)


def _are_counted(layers: nn.ModuleList) -> bool:
    """Return whether the attention in each of these modules has the module's index."""
    return all(any(vars(part).get("layer_idx") == i for part in layer.modules()) for i, layer in enumerate(layers))


class _AttentionRecorder:
    """A stand-in for attention that records what each layer requests.

    Args:
        dtype: of the result.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.layers: dict[int, LayerAttention] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, form: AttentionShape) -> Tensor:
        heads = key.shape[1]
        width = value.shape[2]
        if query.shape[1] % heads or query.shape[2] != key.shape[2] or value.shape[1] != heads:
            shapes = [tuple(numbers.shape[1:]) for numbers in (query, key, value)]
            raise ValueError(f"heads of queries, keys and values that do not fit each other: {shapes}")
        self.layers[layer] = LayerAttention(heads, query.shape[1] // heads, key.shape[2], width, form)
        return query.new_zeros(len(query), query.shape[1] * width, dtype=self._dtype)
