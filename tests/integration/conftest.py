"""Tiny random models of every family, saved as ordinary folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 100
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KV2 = {"num_key_value_heads": 2}


def _mixtral(t: Any) -> Any:
    return t.MixtralConfig(**COMMON, **KV2, num_local_experts=4, num_experts_per_tok=2)


def _gemma2(t: Any) -> Any:
    return t.Gemma2Config(
        **COMMON,
        **KV2,
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
        tie_word_embeddings=False,
    )


def _gpt2(t: Any) -> Any:
    return t.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=128, initializer_range=0.25, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Any], Any]] = {
    "llama": lambda t: t.LlamaConfig(**COMMON, **KV2),
    "qwen3": lambda t: t.Qwen3Config(**COMMON, **KV2, head_dim=12),
    "mistral": lambda t: t.MistralConfig(**COMMON, **KV2, sliding_window=8),
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": lambda t: t.GPTNeoXConfig(**COMMON),
    "phi3": lambda t: t.Phi3Config(**COMMON, **KV2),
    "mixtral": _mixtral,
}


def tiny_tokenizer() -> Any:
    """Letters, and pairs of letters, so that stop strings lie across token borders."""
    import transformers
    from tokenizers import Tokenizer, decoders, models

    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in "aeiou"][: VOCAB - len(letters)]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def build(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model of the family in `folder`, with its tokenizer."""
    import transformers

    config = FAMILIES[family](transformers)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            torch.nn.init.normal_(parameter, 0.0 if family == "gemma2" or "bias" in name else 1.0, 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family name -> folder, built once."""
    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = build(family, tmp_path_factory.mktemp(family))
        return built[family]

    return folder
