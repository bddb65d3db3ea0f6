"""Tiny random models of the families that forerun promises to serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GATED = dict(**_COMMON, intermediate_size=128, num_key_value_heads=2)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GATED)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GATED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GATED, head_dim=32)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GATED, sliding_window=24)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **_GATED,
            head_dim=16,
            sliding_window=24,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,  # low enough to bend the logits of a random model
            final_logit_softcapping=4.0,
            tie_word_embeddings=False,  # tied ones, scaled as Gemma scales them, repeat the last token for ever
        )
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=1024, eos_token_id=None, bos_token_id=None
        )
    ),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_COMMON, intermediate_size=128)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GATED)),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "gpt_oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**_GATED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=24)
    ),
}

MAY_BE_INEXACT = {"gpt_oss"}
"""Families whose experts Transformers computes for all tokens at once; every other one keeps its bits in any company,
and a test that returns early for another one would hide that it no longer does."""


def make_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a tiny random model of the family in float32, with weights wide enough that its text does not loop."""
    torch.manual_seed(seed)
    model = FAMILIES[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
            elif "sinks" in key or "bias" in key:
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / name)
    return folder / name
