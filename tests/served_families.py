"""Which families of decoder-only models are served, found out with a tiny random model of each.

    PYTHONPATH=src:tests python -m served_families     # writes the table of docs/models.md

A family is a class of Transformers; what it can do depends on the version that is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from forerun.errors import UnsupportedModelError
from forerun.models import Rows, load_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- table: python -m served_families -->", "<!-- end of table -->"
_NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
_PLAIN = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_NO_TOKENS}
_PLAIN["max_position_embeddings"] = 1024
_WIDE = {**_PLAIN, "intermediate_size": 128}
_GATED = {**_WIDE, "num_key_value_heads": 2}
_HEADS = {**_GATED, "head_dim": 16}
_GPT = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, **_NO_TOKENS}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _GATED,
    "Mistral": _GATED,
    "Qwen2": _GATED,
    "Qwen3": _HEADS,
    "Cohere": _GATED,
    "Cohere2": {**_GATED, "sliding_window": 24},
    "DeepseekV3": {
        **_WIDE,
        "num_key_value_heads": 4,
        **_LATENT,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Exaone4": _GATED,
    "Gemma": _HEADS,
    "Gemma2": {**_HEADS, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "Gemma3Text": {**_HEADS, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "Glm": _HEADS,
    "Glm4": _HEADS,
    "GPT2": _GPT,
    "GPTBigCode": _GPT,
    "GPTNeoX": _WIDE,
    "GptOss": {**_HEADS, **_LOCAL, "sliding_window": 24},
    "Granite": _GATED,
    "GraniteMoe": {**_GATED, **_LOCAL},
    "Helium": _HEADS,
    "Ministral": _HEADS,
    "Mixtral": {**_GATED, **_LOCAL},
    "Nemotron": _GATED,
    "Olmo": _GATED,
    "Olmo2": _GATED,
    "Olmoe": {**_GATED, "num_experts": 4, "num_experts_per_tok": 2},
    "OPT": {**_PLAIN, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "Phi": _GATED,
    "Phi3": _GATED,
    "Qwen2Moe": {**_GATED, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {**_HEADS, **_EXPERTS},
    "SmolLM3": _GATED,
    "StableLm": _GATED,
    "Starcoder2": _GATED,
    "Bloom": {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_NO_TOKENS},
    "CodeGen": {**_GPT, "rotary_dim": 8},
    "Falcon": _PLAIN,
    "GPTJ": {**_GPT, "rotary_dim": 8},
    "GPTNeo": {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, **_NO_TOKENS}
    | {"attention_types": [[["global", "local"], 1]]},
    "Mpt": {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    "Jamba": {**_GATED, "num_experts": 2},
    "Mamba": {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    "Qwen3Next": {**_HEADS, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "RecurrentGemma": {**_WIDE, "lru_width": 64, "attention_window_size": 24},
}
"""By the name that Transformers' configurations bear: the arguments of a tiny one."""


@dataclass(frozen=True)
class Served:
    """What became of a family: the decoder that serves it ("" if it is refused), and the reason of what it lacks."""

    model_type: str
    decoder: str
    exact: bool
    reason: str

    def row(self, family: str) -> str:
        outcome = f"{self.decoder} decoder" if self.decoder else "refused"
        return f"| {family} | `{self.model_type}` | {outcome} | {'yes' if self.exact else 'no'} | {self.reason} |"


def serve(family: str) -> Served:
    """Make a tiny random model of the family, and load it in float32. Where it is served, its logits must be those that
    Transformers computes."""
    config = getattr(tf, f"{family}Config")(**FAMILIES[family])
    torch.manual_seed(0)
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        try:
            model = load_model(folder, "float32")
        except UnsupportedModelError as error:
            reason = str(error).partition("cannot be served: ")[2].partition(". ")[0].rstrip(".")
            return Served(config.model_type, "", False, reason)
        tokens = list(range(1, 41))
        ours = model.forward([Rows(model.new_cache(), tokens)]).logits
        with torch.inference_mode():
            torch.testing.assert_close(ours, made.eval()(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=2e-4)
    return Served(config.model_type, model.kind, model.exactness.exact, model.exactness.reason or "")


def table(outcomes: dict[str, Served]) -> str:
    head = "| family | model type | served by | same bits | why not |\n|---|---|---|---|---|\n"
    return head + "\n".join(served.row(family) for family, served in outcomes.items()) + "\n"


def main() -> None:
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    text = PAGE.read_text(encoding="utf-8")
    made = table({family: serve(family) for family in FAMILIES})
    before, after = text.partition(START)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
