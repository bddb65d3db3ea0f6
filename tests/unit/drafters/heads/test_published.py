"""Heads in the layouts of their publishers: against the publishers' computation, written with Transformers' layers, and
through the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from families import VOCAB, make_family
from forerun import LLM, Block, Eagle, Medusa, MedusaTree
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.head_files.folder import head_header, load_head
from forerun.drafters.models.medusa.model import MedusaModel, PathCache
from forerun.errors import IncompatibleDrafterError, ModelLoadError
from forerun.models import Model, Rows, load_model
from head_rig import GREEDY
from heads import logits_of, states_of, tokens

NUM_LAYERS, WIDE = 8, 64
DRAFTED = [5, 9, 2]
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDE, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 128}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 32}
MODULES: dict[str, tuple[Any, Any]] = {"llama": (LlamaConfig, llama), "qwen2": (Qwen2Config, qwen2)}
MODULES["qwen3"] = (Qwen3Config, qwen3)


class EagleHead(nn.Module):
    """A head as EAGLE's `cnets1.py` (version 1), its `cnets.py`, SpecForge's `llama3_eagle.py` and `eagle3/core.py` of
    speculators (version 3) have it, with their names but for layers.

    Args:
        bias: fc has one. input_norm: the states are normed together; fc_norm: each by itself.
    """

    def __init__(
        self,
        kind: str,
        version: int,
        num_layers: int = 1,
        *,
        bias: bool = False,
        norm_before_residual: bool = False,
        input_norm: bool = False,
        fc_norm: bool = False,
        draft_vocab_size: int = VOCAB,
        **options: Any,
    ) -> None:
        super().__init__()
        cls, modules = MODULES[kind]
        self.settings = {**SIZES, "num_hidden_layers": num_layers, **options}
        config = cls(**self.settings, attn_implementation="eager")
        prefix = kind.capitalize()
        norm = getattr(modules, f"{prefix}RMSNorm")
        self.version, self.norm_before_residual = version, norm_before_residual
        self.fc = nn.Linear((2 if version == 1 else 3) * WIDE, WIDE, bias=bias)
        layers = [getattr(modules, f"{prefix}DecoderLayer")(config, index) for index in range(num_layers)]
        self.layers, self.rotary = nn.ModuleList(layers), getattr(modules, f"{prefix}RotaryEmbedding")(config)
        first = layers[0]
        if version == 1:
            first.input_layernorm = nn.Identity()
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                given = getattr(first.self_attn, name)
                wide = nn.Linear(2 * WIDE, given.out_features, bias=given.bias is not None)
                setattr(first.self_attn, name, wide)
            first.hidden_norm, self.norm = norm(WIDE, 1e-6), norm(WIDE, 1e-6)
            self.lm_head = nn.Linear(WIDE, draft_vocab_size, bias=False)
        self.input_norm = norm(3 * WIDE, 1e-6) if input_norm else None
        self.fc_norm = nn.ModuleList(norm(WIDE, 1e-6) for _ in range(3)) if fc_norm else None
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            parameter.data = numbers / parameter.shape[1] ** 0.5 if parameter.dim() == 2 else 1 + 0.1 * numbers

    def fused(self, states: Tensor) -> Tensor:
        """states: [n, layers, H]."""
        if self.version == 1:
            return states[:, 0]
        x = states.flatten(1)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, x.chunk(3, -1), strict=True)], -1)
        return self.fc(x)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """What the layers give for rows, [n, H]. states: fused, or what the row before gave."""
        first, count = self.layers[0], len(states)
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        mask = torch.zeros(hidden.shape, dtype=states.dtype).masked_fill(hidden, -torch.inf)[None, None]
        rotation = self.rotary(states[None], torch.arange(count)[None])
        options = {"attention_mask": mask, "position_embeddings": rotation}
        if self.version == 1:
            x = first(self.fc(torch.cat([embeddings, states], -1))[None], **options)
        else:
            normed = first.hidden_norm(states)
            read = torch.cat([first.input_layernorm(embeddings), normed], -1)[None]
            x = (normed if self.norm_before_residual else states)[None] + first.self_attn(read, **options)[0]
            x = x + first.mlp(first.post_attention_layernorm(x))
        for layer in self.layers[1:]:
            x = layer(x, **options)
        return x[0]

    def logits(self, target: Any, states: Tensor, token_ids: list[int]) -> Tensor:
        """[n, draft vocabulary] of rows of these tokens, the first ones beside states of the target, [m, layers, H]."""
        embeddings = target.get_input_embeddings()(torch.tensor(token_ids))
        read = self.fused(states)
        for count in range(len(states), len(token_ids) + 1):
            x = self(embeddings[:count], read)
            read = torch.cat([read, x[-1:]])
        return target.lm_head(x) if self.version == 1 else self.lm_head(self.norm(x))

    def published(self, midlayer: bool) -> dict[str, Tensor]:
        """The tensors by the publisher's names."""
        names = {name: name.replace("layers.0.", "midlayer.") if midlayer else name for name in self.state_dict()}
        return {names[name]: tensor.clone() for name, tensor in self.state_dict().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(scope="module", params=[pytest.param("float64", marks=pytest.mark.slow), "float32"])
def target(folder: Path, request: pytest.FixtureRequest) -> Model:
    return load_model(folder, request.param)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def draft_vocabulary(size: int) -> dict[str, Tensor]:
    """d2t and t2d."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))[:size].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(size), "t2d": mask}


def eagle_1(theirs: Any) -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """yuhuili/EAGLE-LLaMA3-Instruct."""
    head = EagleHead("llama", 1, bias=True, rope_theta=500_000.0)
    more = {"embed_tokens.weight": theirs.get_input_embeddings().weight.float()}
    return head, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": True}, more


def eagle_1_of_qwen2(theirs: Any) -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """yuhuili/EAGLE-Qwen2-Instruct, with two layers."""
    head = EagleHead("qwen2", 1, 2, bias=True)
    return head, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, {}


def eagle_3(theirs: Any) -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct."""
    head = EagleHead("llama", 3, draft_vocab_size=40, rope_theta=500_000.0, rope_scaling=LLAMA_3)
    said = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 40}
    return head, said, draft_vocabulary(40)


def of_spec_forge(theirs: Any) -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """A head of SpecForge: norms of states, a scaled rotation in the new keys, biases."""
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    head = EagleHead("llama", 3, fc_norm=True, draft_vocab_size=40, rope_parameters=rope, attention_bias=True)
    said = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 40, "fc_norm": True}
    said |= {"num_aux_hidden_states": 3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}
    return head, said, {**draft_vocabulary(40), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}


def of_speculators(theirs: Any) -> tuple[EagleHead, dict[str, Any], dict[str, Tensor]]:
    """A head of speculators: two of Qwen3's layers, one norm of all states, `layers.K`."""
    head = EagleHead(
        "qwen3", 3, 2, norm_before_residual=True, input_norm=True, draft_vocab_size=40, head_dim=24, rope_theta=1e6
    )
    said = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "transformer_layer_config": {"model_type": "qwen3", **head.settings},
    }
    return head, said, {**draft_vocabulary(40), "verifier_norm.weight": torch.ones(WIDE)}


EAGLE = [eagle_1, eagle_1_of_qwen2, eagle_3, of_spec_forge, of_speculators]


def same_text(target: Model, drafter: Any, text: list[int]) -> None:
    """Check that greedy and seeded text is that of plain decoding, and that there are drafts."""
    for params in (GREEDY, replace(GREEDY, temperature=0.9, seed=4)):
        plain: Any = LLM(target, None).generate([text, text[:5]], params)
        drafted: Any = LLM(target, drafter(), num_draft_tokens=3).generate([text, text[:5]], params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert all(each.stats.num_draft_tokens > 0 for each in drafted)


def near(found: Tensor, expected: Tensor, target: Model) -> bool:
    return bool((found.double() - expected).abs().max() < (1e-5 if target.dtype == torch.float64 else 2e-4))


@pytest.mark.parametrize("publication", EAGLE)
def test_eagle(publication: Callable[[Any], Any], theirs: Any, target: Model, tmp_path: Path) -> None:
    reference, config, more = publication(theirs)
    said = config if "speculators_model_type" in config else {**reference.settings, **config}
    tensors = {**reference.published("speculators_model_type" not in config and reference.version == 3), **more}
    write(tmp_path, said, tensors)
    head, text = load_head(tmp_path, NUM_LAYERS), tokens(19, 2)
    assert head_header(tmp_path, NUM_LAYERS).config == head.config
    states = states_of(target, head, text[:-1]).double()
    with torch.inference_mode():
        expected = reference.double().logits(theirs, states, [*text[1:], *DRAFTED])
    assert near(logits_of(target, head, text, DRAFTED), expected, target)
    same_text(target, lambda: Eagle(tmp_path), text)


def medusa_tensors(num_heads: int, num_layers: int, wide: int = WIDE, vocab: int = VOCAB) -> dict[str, Tensor]:
    """The heads as `medusa_model.py` names them: a sequence of residual blocks, then rows of the vocabulary."""
    generator, found = torch.Generator().manual_seed(1), {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = torch.randn(wide, wide, generator=generator) / 8
            found[f"{head}.{layer}.linear.bias"] = torch.randn(wide, generator=generator)
        found[f"{head}.{num_layers}.weight"] = torch.randn(vocab, wide, generator=generator) / 8
    return found


MEDUSA = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 3, "medusa_num_layers": 2}


def test_medusas_own_file(target: Model, tmp_path: Path) -> None:
    tensors = medusa_tensors(3, 2)
    write(tmp_path, MEDUSA, tensors, "medusa_lm_head.safetensors")
    head, text = load_head(tmp_path, NUM_LAYERS), tokens(9, 3)
    assert head_header(tmp_path, NUM_LAYERS).config == head.config and head.form == "Medusa"
    state = states_of(target, head, text)[-1:, 0].double()  # type: ignore[arg-type]
    model = MedusaModel(head, target)  # type: ignore[arg-type]
    found = model.look([PathCache(num_heads=3)], state)
    for number, logits in enumerate(found):
        x, part = state, {name: tensor.double() for name, tensor in tensors.items()}
        for layer in range(2):
            name = f"{number}.{layer}.linear"
            x = x + F.silu(F.linear(x, part[f"{name}.weight"], part[f"{name}.bias"]))
        assert near(logits, (x @ part[f"{number}.2.weight"].T)[0], target)
    for drafter in (Medusa, MedusaTree):
        same_text(target, lambda drafter=drafter: drafter(tmp_path), text)


class DFlash(nn.Module):
    """A head as z-lab's `dflash.py` has it: queries of a block's slots, keys of the states before and of the slots."""

    def __init__(self, config: Qwen3Config, num_states: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(qwen3.Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.rotary, self.eps = qwen3.Qwen3RotaryEmbedding(config), config.rms_norm_eps
        self.fc = nn.Linear(num_states * WIDE, WIDE, bias=False)
        self.hidden_norm, self.norm = (qwen3.Qwen3RMSNorm(WIDE, config.rms_norm_eps) for _ in range(2))
        self.width = config.head_dim
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            parameter.data = numbers / parameter.shape[1] ** 0.5 if parameter.dim() == 2 else 1 + 0.1 * numbers

    def forward(self, states: Tensor, slots: Tensor) -> Tensor:
        """[slots, H] of slots, which hold embeddings. states: [n, layers * H] of the positions before."""
        context, x = self.hidden_norm(self.fc(states)), slots
        count = len(states) + len(slots)
        turns = self.rotary(x[None], torch.arange(count)[None])
        for layer in self.layers:
            attention, h = layer.self_attn, layer.input_layernorm(x)
            both = torch.cat([context, h])
            query = attention.q_norm(attention.q_proj(h).view(len(h), -1, self.width))
            key = attention.k_norm(attention.k_proj(both).view(count, -1, self.width))
            value = attention.v_proj(both).view(count, -1, self.width)
            query, key = (each.transpose(0, 1)[None] for each in (query, key))
            query = F.pad(query, (0, 0, len(states), 0))
            query, key = qwen3.apply_rotary_pos_emb(query, key, *turns)
            query, value = query[:, :, len(states) :], value.transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            x = x + attention.o_proj(mixed[0].transpose(0, 1).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def dflash(folder: Path, **options: Any) -> DFlash:
    rope = {**LLAMA_3, "rope_theta": 10_000.0}
    config = Qwen3Config(**{**SIZES, "num_hidden_layers": 2}, head_dim=24, rope_parameters=rope)
    said: dict[str, Any] = {
        **config.to_dict(),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]},
        "num_target_layers": NUM_LAYERS,
    }
    head = DFlash(config, 3)
    write(folder, {**said, **options}, dict(head.state_dict()))
    return head


def test_dflash(theirs: Any, target: Model, tmp_path: Path) -> None:
    reference = dflash(tmp_path).double()
    head, text = load_head(tmp_path, NUM_LAYERS), tokens(11, 6)
    assert head.config.layers == (2, 4, 6) and head.form == "DFlash"  # what leaves layers 1, 3 and 5
    states = states_of(target, head, text[:-1])  # type: ignore[arg-type]
    model: Any = BlockModel(head, target)  # type: ignore[arg-type]
    cache = model.new_cache()
    model.forward([Rows(cache, text[:-1], None, 0, states=model.fuse(states))])
    cache.commit(range(len(text) - 1))
    _, logits = model.draft([BlockInput(cache, text[-1], 3)])
    slots = theirs.get_input_embeddings()(torch.tensor([text[-1], 7, 7, 7]))
    with torch.inference_mode():
        expected = theirs.lm_head(reference(states.double().flatten(1), slots)[1:])
    assert near(logits, expected, target)
    same_text(target, lambda: Block(tmp_path), text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "of these heads DFlashDraftModel is served"),
        ({"model_type": "llama"}, "block heads are served whose layers are Qwen3's"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has 'sliding_attention'"),
        ({"dflash_config": {"mask_token_id": 7, "output_multiplier": 0.5}}, "output_multiplier is 0.5"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 7]}}, "state of layer 8, and the target has 8"),
    ],
)
def test_dflash_that_is_not_served(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    dflash(tmp_path, **options)
    with pytest.raises(ModelLoadError, match=said):
        load_head(tmp_path, NUM_LAYERS)


def test_layers_that_dflash_does_not_name(tmp_path: Path) -> None:
    """Of two layers these are the first and the third last of the target."""
    dflash(tmp_path, dflash_config={"mask_token_id": 7})
    with pytest.raises(ModelLoadError, match=r"fc\.weight has shape \[64, 192\], and must have \[64, 128\]"):
        load_head(tmp_path, NUM_LAYERS)


def test_medusa_of_other_sizes(target: Model, tmp_path: Path) -> None:
    def bound(tensors: dict[str, Tensor], **config: Any) -> None:
        write(tmp_path, {**MEDUSA, **config}, tensors, "medusa_lm_head.safetensors")
        LLM(target, Medusa(tmp_path))

    with pytest.raises(ModelLoadError, match=r"blocks\.2\.layers\.1\.bias \[64\] is missing"):
        bound({name: each for name, each in medusa_tensors(3, 2).items() if name != "2.1.linear.bias"})
    with pytest.raises(IncompatibleDrafterError, match="32 numbers, but those of"):
        bound(medusa_tensors(3, 2, wide=32))
    with pytest.raises(IncompatibleDrafterError, match="of a target of 97 tokens, but"):
        bound(medusa_tensors(3, 2, vocab=97))
    with pytest.raises(ModelLoadError, match="medusa_num_layers is 0, but must be"):
        bound(medusa_tensors(3, 2), medusa_num_layers=0)
