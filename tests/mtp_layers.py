"""The MTP layer of Qwen3.5 and Qwen3-Next by Transformers' own modules, and checkpoints that carry one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from families import make_family

FAMILY = "qwen3_5_text"
TINY = Path(__file__).parent / "data" / "tiny-qwen3.5"
"""A trained one."""
WEIGHTS = "model.safetensors"


class QwenMtp(nn.Module):
    """Its parameters have the names of the checkpoints below `mtp.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config, norm, layer = model.config, type(model.model.norm), type(model.model.layers[0])
        wide, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(wide, eps) for _ in range(3))
        self.fc = nn.Linear(2 * wide, wide, bias=False)
        self.layers = nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])

    def forward(self, embeddings: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the normed states of rows, [n, H]. embeddings, states: [n, H], of token i + 1 and of token i."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)], -1))[None]
        hidden = torch.ones(len(states), len(states), dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, -torch.inf)[None, None]
        normed: Tensor = self.norm(self.layers[0](x, position_embeddings=rotation, attention_mask=mask))
        return normed[0]


def with_mtp(folder: Path, family: str = FAMILY, seed: int = 0, **options: Any) -> Path:
    """Save a tiny random model whose checkpoint carries an MTP layer."""
    path = make_family(family, folder, seed, **(options or {"mtp_num_hidden_layers": 1}))
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(seed + 2)
    tensors = load_file(path / WEIGHTS)
    for name, tensor in QwenMtp(model).state_dict().items():
        tensors[f"mtp.{name}"] = 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


@torch.inference_mode()
def expected_logits(path: Path, token_ids: list[int], drafted: list[int], states: Tensor | None = None) -> Tensor:
    """Return the logits of an MTP layer in float64, [len(token_ids) - 1 + len(drafted), V].

    Args:
        token_ids: of a text; the model's states of all but the last are read.
        drafted: tokens behind it, each beside what the layer gave for the row before.
        states: [n, H] of the text; None: those of Transformers' model, in whose recurrent layers numbers are float32.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    layer = QwenMtp(model).double()
    stored = load_file(path / WEIGHTS)
    layer.load_state_dict({name.removeprefix("mtp."): each for name, each in stored.items() if name.startswith("mtp.")})
    read = states
    if read is None:
        read = model.model(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state[0]
    embeddings = model.get_input_embeddings()(torch.tensor([*token_ids[1:], *drafted]))
    for count in range(len(read), len(embeddings) + 1):
        rotation = model.model.rotary_emb(embeddings[None], torch.arange(count)[None])
        normed = layer(embeddings[:count], read, rotation)
        read = torch.cat([read, normed[-1:]])
    logits: Tensor = model.lm_head(normed)
    return logits
