"""The MTP layers that checkpoints carry, computed by Transformers' own modules as vLLM's `qwen3_next_mtp.py`,
`deepseek_mtp.py`, `glm4_moe_mtp.py` and MiMo's `modeling_mimo.py` do, and checkpoints in their publishers' layouts."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from families import make_family, tiny_config

FAMILY = "qwen3_5_text"
TINY = Path(__file__).parents[2] / "data" / "tiny-qwen3.5"
"""A trained one."""
WEIGHTS = "model.safetensors"


class Layout(NamedTuple):
    """How a publisher names the parts of a layer, {} for the number of the model's layers, and computes with them."""

    embedding_norm: str
    state_norm: str
    fc: str
    norm: str
    layer: str
    state_first: bool = False
    hands_on_normed: bool = True
    stacked: bool = False


QWEN = Layout("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
QWEN_STACKED = QWEN._replace(stacked=True)
DEEPSEEK = Layout(
    *(f"model.layers.{{}}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "model.layers.{}",
    hands_on_normed=False,
)
MIMO = Layout(
    *(f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj")),
    "model.mtp_layers.0.final_layernorm",
    "model.mtp_layers.0",
    state_first=True,
)


class MtpLayer(nn.Module):
    """Its parts have the names of `Layout`; the block is one of the model's own, with other weights.

    Args:
        seed: of the weights.
    """

    def __init__(self, model: Any, layout: Layout, seed: int) -> None:
        super().__init__()
        config, norm = model.config, type(model.model.norm)
        wide, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm, self.state_norm, self.norm = (norm(wide, eps) for _ in range(3))
        self.fc = nn.Linear(2 * wide, wide, bias=False)
        self.layer = deepcopy(model.model.layers[-1])
        self.layout, generator = layout, torch.Generator().manual_seed(seed)
        for tensor in self.state_dict().values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))

    def forward(self, embeddings: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the normed states of rows, [n, H], and what goes to the rows behind them. embeddings, states: [n, H],
        of token i + 1 and of token i."""
        pair = [self.embedding_norm(embeddings), self.state_norm(states)]
        x = self.fc(torch.cat(pair[::-1] if self.layout.state_first else pair, -1))[None]
        hidden = torch.ones(len(states), len(states), dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, -torch.inf)[None, None]
        x = self.layer(x, position_embeddings=rotation, attention_mask=mask)[0]
        normed: Tensor = self.norm(x)
        return normed, normed if self.layout.hands_on_normed else x

    def published(self, num_layers: int) -> dict[str, Tensor]:
        """The tensors by the publisher's names."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            part, _, rest = name.partition(".")
            name = f"{getattr(self.layout, part).format(num_layers)}.{rest}"
            if ".experts." not in name or self.layout.stacked:
                found[name] = tensor.clone()
                continue
            for index, expert in enumerate(tensor):
                path = name.replace("experts.", f"experts.{index}.")
                if "gate_up" in name:
                    gate, up = expert.chunk(2)
                    found[path.replace("gate_up_proj", "gate_proj.weight")] = gate.clone()
                    found[path.replace("gate_up_proj", "up_proj.weight")] = up.clone()
                else:
                    found[f"{path}.weight"] = expert.clone()
        return found


def _model(path: Path, family: str, dtype: torch.dtype) -> Any:
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(family))]
    model = cls.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model


def with_mtp(folder: Path, family: str = FAMILY, seed: int = 0, layout: Layout = QWEN, **options: Any) -> Path:
    """Save a tiny random model whose checkpoint carries an MTP layer."""
    path = make_family(family, folder, seed, **(options or {"mtp_num_hidden_layers": 1}))
    model = _model(path, family, torch.float32)
    layer = MtpLayer(model, layout, seed + 2).published(model.config.num_hidden_layers)
    save_file({**load_file(path / WEIGHTS), **layer}, path / WEIGHTS, metadata={"format": "pt"})
    if layout is not QWEN and layout is not QWEN_STACKED:
        said = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        said |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]} if layout is MIMO else {}
        (path / "config.json").write_text(json.dumps(said))
    return path


@torch.inference_mode()
def expected_logits(
    path: Path,
    token_ids: list[int],
    drafted: list[int],
    states: Tensor | None = None,
    family: str = FAMILY,
    layout: Layout = QWEN,
) -> Tensor:
    """Return the logits of an MTP layer in float64, [len(token_ids) - 1 + len(drafted), V].

    Args:
        token_ids: of a text; the model's states of all but the last are read.
        drafted: tokens behind it, each beside what the layer gave for the row before.
        states: [n, H] of the text; None: those of Transformers' model, in whose recurrent layers numbers are float32.
    """
    model = _model(path, family, torch.float64)
    layer = MtpLayer(_model(path, family, torch.float32), layout, 2).double()
    read = states
    if read is None:
        read = model.model(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state[0]
    embeddings = model.get_input_embeddings()(torch.tensor([*token_ids[1:], *drafted]))
    for count in range(len(read), len(embeddings) + 1):
        rotation = model.model.rotary_emb(embeddings[None], torch.arange(count)[None])
        normed, given = layer(embeddings[:count], read, rotation)
        read = torch.cat([read, given[-1:]])
    logits: Tensor = model.lm_head(normed)
    return logits
