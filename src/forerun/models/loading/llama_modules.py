"""The Llama family's parameters in modules with Transformers' names, made and read without its modelling code, whose
import takes seconds. Nothing computes with these modules: the decoders of `models/llama/` take them apart.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from forerun.models.llama.decoder import head_shape
from forerun.models.loading.weights import FLOATS, Checkpoint
from forerun.utils.foreign_errors import REMEDY, as_load_errors


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: drawing numbers on the device "meta" imports a compiler, which takes a second."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as `_Linear`."""


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class LlamaModules(nn.Module):
    """The modules of a model of the Llama family, on the device "meta".

    Args:
        config: of Transformers, or `PlainConfig`.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype, hidden = config, dtype, config.hidden_size
        with torch.device("meta"):
            base: Any = nn.Module()
            base.embed_tokens = _Embedding(config.vocab_size, hidden)
            base.layers = nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers))
            base.norm = _Norm(hidden)
            self.model: Any = base  # first: a tied weight has its name from the embedding
            self.lm_head = _Linear(hidden, config.vocab_size, bias=False)
            self.to(dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = base.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as Transformers' method does."""
        embedding: nn.Module = self.model.embed_tokens
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, as Transformers' method does."""
        return self.lm_head


def _layer(config: Any) -> nn.Module:
    (heads, kv_heads, width), hidden, kind = head_shape(config), config.hidden_size, config.model_type
    has_biases = kind in ("llama", "qwen3") and config.attention_bias
    layer, attention, mlp = nn.Module(), nn.Module(), nn.Module()
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        attention.add_module(name, _Linear(hidden, count * width, bias=has_biases or kind == "qwen2"))
    attention.o_proj = _Linear(heads * width, hidden, bias=has_biases)
    if kind == "qwen3":
        attention.q_norm, attention.k_norm = _Norm(width), _Norm(width)
    mlp.gate_proj, mlp.up_proj = (_Linear(hidden, config.intermediate_size, bias=False) for _ in range(2))
    mlp.down_proj = _Linear(config.intermediate_size, hidden, bias=False)
    layer.self_attn, layer.mlp = attention, mlp
    layer.input_layernorm, layer.post_attention_layernorm = _Norm(hidden), _Norm(hidden)
    return layer


def read_llama(name: str, config: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> LlamaModules | None:
    """Return the modules of a model of the Llama family with a checkpoint's weights, on the CPU; None if these are not
    exactly the model's: Transformers then decides what is missing, left over or to be converted.

    dtype: that the weights are brought to.

    Raises:
        ModelLoadError: the weights are damaged.
    """
    slices = checkpoint.slices
    if len(slices) < config.num_hidden_layers:  # a wrong number may be any
        return None
    model = LlamaModules(config, dtype)
    expected = dict(model.named_parameters())
    if slices.keys() != expected.keys() or not all(
        each.get_shape() == list(expected[key].shape) and each.get_dtype() in FLOATS for key, each in slices.items()
    ):
        return None
    with as_load_errors(f"the weights of {name} cannot be read", REMEDY):
        for key, tensor in checkpoint.state_dict(dtype).items():
            path, _, leaf = key.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(tensor[...].to(dtype), requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    frequencies, scaling = rotation(config)
    model.model.rotary_emb = SimpleNamespace(inv_freq=frequencies, attention_scaling=scaling)  # no parameters
    return model


def rotation(config: Any) -> tuple[Tensor, float]:
    """Return the rotary embedding's inverse frequencies, [head_dim / 2] float32, and the factor of its cosines and
    sines, as Transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, width = config.rope_parameters, head_shape(config)[2]
    if rope["rope_type"] == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)), 1.0
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return frequencies, scaling
