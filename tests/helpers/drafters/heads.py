"""Random EAGLE heads for a model, and what a head computes in plain PyTorch: slowly, row by row, without a cache."""

from __future__ import annotations

from atexit import register
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from doubles import FakeModel, MarkovModel
from families import VOCAB
from forerun.config import BUNDLED_TARGET
from forerun.drafters import DRAFTERS
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.models import Forward, LanguageModel, Model, Rows, load_model, load_tokenizer
from forerun.utils import workloads
from medusa_heads import fitted_medusa


def random_head(
    target: Model, seed: int = 0, draft_vocab_size: int | None = None, **options: Any
) -> StoredHead[EagleConfig]:
    """A head of random weights that reads two states (version 1: one) and proposes so many tokens, or all."""
    generator = torch.Generator().manual_seed(seed)
    version = options.pop("version", 3)
    vocab, width = target.vocab_size, target.embedding_rows(torch.tensor([0])).shape[1]
    size = draft_vocab_size or vocab
    layers = (target.num_layers,) if version == 1 else (0, target.num_layers)
    config = EagleConfig(
        **{
            "version": version,
            "vocab_size": vocab,
            "draft_vocab_size": size,
            "hidden_size": width,
            "target_hidden_size": width,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "layers": layers,
            **options,
        }
    )
    tensors = {}
    for name, shape in config.tensors().items():
        numbers = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * numbers if len(shape) == 1 else 1.5 * numbers * shape[1] ** -0.5
    if size == vocab:
        return StoredHead(config, tensors)
    tokens = torch.randperm(vocab, generator=generator)[:size].sort().values
    return StoredHead(config, tensors, tokens - torch.arange(size))


def text_of(drafter: str) -> str:
    """A drafter of the table as the bundled target is served with it: a fitted head where none is shipped."""
    if DRAFTERS[drafter].kind != "head" or DRAFTERS[drafter].serves(BUNDLED_TARGET):
        return drafter
    return f"{drafter}:model={_bundled_head(drafter.removesuffix('-tree'))}"


@cache
def _bundled() -> Model:
    return load_model("bundled", "float32")


@cache
def _bundled_head(kind: str) -> Path:
    """The folder of a head for the bundled target, fitted to some of the bundled code; Medusa heads need more of it."""
    target, tokenizer = _bundled(), load_tokenizer("bundled")
    texts = [
        tokenizer(case.prompt)["input_ids"][:150]
        for case in workloads.load_workload("code", 40 if kind == "medusa" else 16)[4:]
    ]
    folder = Path(mkdtemp()) / "head"
    register(rmtree, folder.parent, ignore_errors=True)
    head: StoredHead[Any] = FITTED[kind](target, texts)
    save_head(folder, head.config, head.tensors, fingerprint=target_fingerprint(target))
    return folder


def fitted_block(target: Model, texts: Seq[Seq[int]]) -> StoredHead[Any]:
    """See `blocks.py`, which reads this module."""
    import blocks

    return blocks.fitted_block(target, texts)


def _without_attention(vocab: int, width: int, layers: tuple[int, ...]) -> EagleConfig:
    return EagleConfig(
        version=1,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        hidden_size=width,
        target_hidden_size=width,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=2,
        layers=layers,
    )


def fitted_head(target: Model, texts: Seq[Seq[int]], **shape: int) -> StoredHead[EagleConfig]:
    """The head (version 1, without attention) whose map of [embedding; state] to the next state is best by least
    squares. Of the bundled target's greedy tokens it guesses about one in six. shape: of what does nothing in it."""
    width = target.embedding_rows(torch.tensor([0])).shape[1]
    vocab, layers = target.vocab_size, (target.num_layers,)
    config = replace(_without_attention(vocab, width, layers), **shape)
    tensors = {name: torch.zeros(size) for name, size in config.tensors().items()}
    head = StoredHead(config, tensors)
    read, wanted = [], []
    for text in texts:
        states = states_of(target, head, text)[:, 0].double()
        read.append(torch.cat([target.embedding_rows(torch.tensor(list(text)))[1:].double(), states[:-1]], 1))
        wanted.append(states[1:])
    x, y = torch.cat(read), torch.cat(wanted)
    products = x.T @ x
    products += 1e-3 * products.diagonal().mean() * torch.eye(len(products))
    tensors["fc.weight"] = torch.linalg.solve(products, x.T @ y).T.float().contiguous()
    return head


def fitted_mtp(target: Model, texts: Seq[Seq[int]]) -> StoredHead[EagleConfig]:
    """An MTP layer whose block does nothing, and whose map of [embedding; state], normed, is best by least squares."""
    plain = fitted_head(target, texts)
    config = replace(plain.config, is_mtp=True, norm_output=True)
    tensors = {name: torch.zeros(shape) for name, shape in config.tensors().items()}
    tensors |= {name: torch.ones(len(tensor)) for name, tensor in tensors.items() if tensor.ndim == 1}
    read, wanted = [], []
    for text in texts:
        states = states_of(target, plain, text)[:, 0].double()
        embeddings = target.embedding_rows(torch.tensor(list(text)))[1:].double()
        pair = [_norm(part, torch.ones(part.shape[1]).double(), config) for part in (embeddings, states[:-1])]
        read.append(torch.cat(pair, 1))
        wanted.append(states[1:])
    x, y = torch.cat(read), torch.cat(wanted)
    products = x.T @ x
    products += 1e-3 * products.diagonal().mean() * torch.eye(len(products))
    tensors["fc.weight"] = torch.linalg.solve(products, x.T @ y).T.float().contiguous()
    tensors["norm.weight"] *= float(y.pow(2).mean().sqrt())
    return StoredHead(config, tensors)


FITTED = {"mtp": fitted_mtp, "eagle": fitted_head, "medusa": fitted_medusa, "block": fitted_block}
"""By kind of head, what fits one to some texts."""


def states_of(target: LanguageModel, head: StoredHead[EagleConfig], text: Seq[int]) -> Tensor:
    """[n, layers, H] the target's states of a text that the head reads."""
    rows = Rows(target.new_cache(), list(text), num_logits=0, num_hidden_outputs=len(text))
    hidden_outputs = target.forward([rows], head.config.layers).hidden_outputs
    assert hidden_outputs is not None
    return hidden_outputs


def tokens(count: int, seed: int) -> list[int]:
    """Random tokens of the tiny families."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(target: Model, head: StoredHead[EagleConfig], text: list[int], drafted: list[int]) -> Tensor:
    """A head's logits of a text in two chunks, and of drafted tokens row by row."""
    model, found = EagleModel(head, target), []
    cache, states = model.new_cache(), model.fuse(states_of(target, head, text[:-1]))
    for part in (slice(0, 7), slice(7, None)):
        result = model.forward([Rows(cache, text[1:][part], states=states[part])])
        cache.commit(range(len(text[1:][part])))
        found.append(result.logits)
    for token in drafted:
        assert result.hidden_outputs is not None
        result = model.forward([Rows(cache, [token], states=result.hidden_outputs[-1])])
        found.append(result.logits)
    return torch.cat(found)


def reference_logits(
    head: StoredHead[EagleConfig],
    target: LanguageModel,
    token_ids: Seq[int],
    hidden_outputs: Tensor,
    num_drafted: int = 0,
) -> Tensor:
    """[n, V] float64 logits of each row of a chain.

    Args:
        token_ids: [n] of each row: row i holds the token that comes after position i.
        hidden_outputs: [n - num_drafted, layers, H] of the target, of the first rows.
        num_drafted: the last rows, whose states are the outputs of the rows before them.
    """
    config = head.config
    weight = {name: tensor.double() for name, tensor in head.tensors.items()}
    fused = [_fused(config, weight, each.double()) for each in hidden_outputs]
    embedding = target.embedding_rows(torch.tensor(list(token_ids))).double()
    raw: list[Tensor] = []
    inputs: list[tuple[Tensor, Tensor]] = []
    for row in range(len(token_ids)):
        state = fused[row] if row < len(token_ids) - num_drafted else _passed_on(config, weight, raw[-1])
        inputs.append(_entering(config, weight, embedding[row], state))
        raw.append(_row(config, weight, inputs))
    logits = torch.full((len(token_ids), config.vocab_size), -torch.inf, dtype=torch.float64)
    tokens = torch.arange(config.draft_vocab_size) + (0 if head.d2t is None else head.d2t)
    rows = weight["lm_head.weight"] if config.own_output_rows else target.output_rows(tokens).double()
    for row, output in enumerate(raw):
        normed = _norm(output, weight["norm.weight"], config) if "norm.weight" in weight else output
        logits[row, tokens] = rows @ normed
    return logits


def _fused(config: EagleConfig, weight: dict[str, Tensor], states: Tensor) -> Tensor:
    """states: [layers, H]."""
    if config.version == 1:
        return states[0]
    if config.norm_before_fc:
        states = torch.stack([_norm(each, weight[f"fc_norm.{i}.weight"], config) for i, each in enumerate(states)])
    flat = states.flatten()
    return _map(weight, "fc", _norm(flat, weight["input_norm.weight"], config) if config.norm_all_before_fc else flat)


def _map(weight: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The product of a matrix, and its bias."""
    return weight[f"{name}.weight"] @ x + weight.get(f"{name}.bias", 0.0)


def _entering(
    config: EagleConfig, weight: dict[str, Tensor], embedding: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What attention reads of a row, and the row's residual."""
    if config.is_mtp:
        pair = _norm(embedding, weight["enorm.weight"], config), _norm(state, weight["hnorm.weight"], config)
        x = _map(weight, "fc", torch.cat(pair))
        return _norm(x, weight["layers.0.input_layernorm.weight"], config), x
    if config.version == 1:
        x = _map(weight, "fc", torch.cat([embedding, state]))
        return x, x
    normed = _norm(state, weight["midlayer.hidden_norm.weight"], config)
    read = torch.cat([_norm(embedding, weight["midlayer.input_layernorm.weight"], config), normed])
    residual = normed if config.norm_before_residual else state
    if config.embedding_residual:
        residual = residual + weight["embedding_residual.weight"] @ embedding
    return read, residual


def _row(config: EagleConfig, weight: dict[str, Tensor], inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What the layers give for the last of these rows."""
    layer = "layers.0" if config.version == 1 else "midlayer"
    for further in range(1, config.num_layers):
        given = [_of_layer(config, weight, inputs[: count + 1], layer) for count in range(len(inputs))]
        layer = f"layers.{further}"
        inputs = [(_norm(x, weight[f"{layer}.input_layernorm.weight"], config), x) for x in given]
    return _of_layer(config, weight, inputs, layer)


def _of_layer(
    config: EagleConfig, weight: dict[str, Tensor], inputs: list[tuple[Tensor, Tensor]], layer: str
) -> Tensor:
    """What one layer gives for the last of these rows."""
    last = len(inputs) - 1
    window = config.sliding_window or len(inputs)
    seen = range(max(0, last - window + 1), last + 1)
    width = config.head_dim

    @cache
    def projected(name: str, row: int) -> Tensor:
        return _map(weight, f"{layer}.self_attn.{name}_proj", inputs[row][0])

    def part(name: str, row: int, place: int) -> Tensor:
        x = projected(name, row)[place * width :][:width]
        norm = weight.get(f"{layer}.self_attn.{name}_norm.weight")
        return x if norm is None else _norm(x, norm, config)

    @cache
    def key(row: int, place: int) -> Tensor:
        return _rotated(config, part("k", row, place), row)

    heads = []
    for head in range(config.num_heads):
        group = head // (config.num_heads // config.num_kv_heads)
        query = _rotated(config, part("q", last, head), last)
        scores = torch.stack([query @ key(row, group) for row in seen])
        accept_probs = (scores * width**-0.5).softmax(0)
        mixed = sum(accept_prob * part("v", row, group) for accept_prob, row in zip(accept_probs, seen, strict=True))
        heads.append(mixed)
    x = inputs[last][1] + _map(weight, f"{layer}.self_attn.o_proj", torch.cat(heads))  # type: ignore[arg-type]
    h = _norm(x, weight[f"{layer}.post_attention_layernorm.weight"], config)
    gate, up = (_map(weight, f"{layer}.mlp.{name}_proj", h) for name in ("gate", "up"))
    return x + _map(weight, f"{layer}.mlp.down_proj", gate * gate.sigmoid() * up)


def _passed_on(config: EagleConfig, weight: dict[str, Tensor], output: Tensor) -> Tensor:
    return _norm(output, weight["norm.weight"], config) if config.norm_output else output


def _rotated(config: EagleConfig, x: Tensor, position: int) -> Tensor:
    """Numbers i and i + D/2 turned by position * theta^(-2i/D), or as Transformers scales it."""
    half, factor = config.head_dim // 2, 1.0
    angles = config.rope_theta ** -(torch.arange(half).double() / half)
    if config.rope_scaling:
        rope = {**config.rope_scaling, "rope_theta": config.rope_theta}
        sizes = {"hidden_size": config.hidden_size, "num_attention_heads": config.num_heads}
        own = LlamaConfig(**sizes, head_dim=config.head_dim, max_position_embeddings=64, rope_parameters=rope)
        angles, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](own)
    angles, a, b = position * angles, x[:half], x[half:]
    return factor * torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def _norm(x: Tensor, weight: Tensor, config: EagleConfig) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight


class AdditiveModel(FakeModel):
    """A target whose logits are A of the last token plus B of the one before, and whose state of a position holds that
    position's token: just what a head needs beside the token that follows. float64."""

    def __init__(self, vocab_size: int = 11, seed: int = 0, scale: float = 3.0) -> None:
        super().__init__(vocab_size, order=2, dtype=torch.float64, num_contexts=(vocab_size + 1) * vocab_size + 1)
        generator = torch.Generator().manual_seed(seed)
        self.last, self.before = scale * torch.randn(2, vocab_size, vocab_size, generator=generator).double()
        slots = torch.arange(1, len(self.table))
        before, last = (slots - 1) // vocab_size - 1, (slots - 1) % vocab_size
        self.table[1:] = self.last[last] + self.before[before] * (before >= 0)[:, None]

    def hidden_outputs(self, slots: list[int], layers: Seq[int]) -> Tensor | None:
        """The token of each position, as the second half of `embedding_rows`."""
        if not layers:
            return None
        return self.embedding_rows((torch.tensor(slots, dtype=torch.int64) - 1) % self.vocab_size)[:, None]

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """[n, 2 V]: nothing, then one number of each token."""
        return torch.eye(2 * self.vocab_size)[token_ids + self.vocab_size]

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """[n, 2 V]: the first half of the state are the logits."""
        return torch.eye(2 * self.vocab_size)[token_ids]


def aligned_head(target: AdditiveModel | MarkovTarget) -> StoredHead[EagleConfig]:
    """A head (version 1, without attention) that is never wrong, if row i holds token i + 1 beside the state of token i
    and a drafted row the output of the row before; fed in any other way, it is hardly ever right."""
    vocab = target.vocab_size
    config = _without_attention(vocab, 2 * vocab, (1,))
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in config.tensors().items()}
    fuse = tensors["fc.weight"]  # [logits; token] of [nothing; token i + 1; anything; token i]
    fuse[:vocab, vocab : 2 * vocab] = target.last.T
    fuse[:vocab, 3 * vocab :] = target.before.T
    fuse[vocab:, vocab : 2 * vocab] = torch.eye(vocab)
    return StoredHead(config, tensors)


class MarkovTarget(MarkovModel):
    """A target of order 1 whose state of a position holds that position's token, as `AdditiveModel`'s."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.last, self.before = table, torch.zeros_like(table)

    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        logits = super().forward(batch, layers).logits
        hidden_rows = [
            token for rows in batch for token in rows.token_ids[len(rows.token_ids) - rows.num_hidden_rows :]
        ]
        return Forward(
            logits, self.embedding_rows(torch.tensor(hidden_rows, dtype=torch.int64))[:, None] if layers else None
        )

    embedding_rows = AdditiveModel.embedding_rows
    output_rows = AdditiveModel.output_rows


def noisy_head(target: AdditiveModel | MarkovTarget) -> StoredHead[EagleConfig]:
    """`aligned_head` with errors that depend on both tokens, and without token 0 among those that it can propose."""
    head = aligned_head(target)
    vocab = target.vocab_size
    generator = torch.Generator().manual_seed(9)
    head.tensors["fc.weight"][:vocab] += 0.8 * torch.randn(vocab, 4 * vocab, generator=generator)
    return StoredHead(replace(head.config, draft_vocab_size=vocab - 1), head.tensors, torch.ones(vocab - 1).long())
