"""Make the tiny Qwen3.5 of tests/data: three layers of linear attention, one of full attention, and an MTP layer.

    python -m tools.tiny_qwen35 tests/data/tiny-qwen3.5

writes a folder of Transformers' model type `qwen3_5_text` whose weights take less than 400 kB, with a byte-level BPE of
512 tokens. The text is that of the bundled models, Python source of the interpreter's standard library without the
held-out files. The model learns the next token, and the MTP layer at the same time the model's own distribution one
token further; no gradient goes from one to the other. The figures that are printed, and written to the folder's
README.md, are of the stored bfloat16 weights computed in float32, on the bundled held-out files.

Transformers has no MTP layer, so `Mtp` computes it, as vLLM's qwen3_5_mtp.py does: row i reads the embedding of token
i + 1 and the model's state of token i behind the final norm, at position i, and predicts token i + 2.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5ForCausalLM, Qwen3_5RMSNorm

from forerun.errors import ConfigError
from forerun.train.card import CARD, save_model, versions
from forerun.train.corpus import SourceFile, read_held_out
from forerun.train.defaults import Optimisation
from forerun.train.optim import Optimisers
from forerun.utils.files import refuse_to_overwrite, write_bytes
from tools.lm import train_tokenizer
from tools.text import EpochTexts, Windows, tokenize
from tools.toys import Data, Force, Out, read_corpus

_LAYERS = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
_FULL = {"full_attention_interval": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
_ROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_MTP = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
SIZES: dict[str, Any] = {**_LAYERS, **_FULL, **_DELTA, "rope_parameters": _ROPE, "attn_output_gate": True, **_MTP}
WEIGHTS = "model.safetensors"
WINDOW, COPY_SHARE = 512, 0.3
"""Tokens of a window; share of the files with repeated spans."""
OPTIMISATION = Optimisation(adam_lr=0.01)
STEP_SIZES = 1e-3, 1e-1
"""Bounds of the random time steps of linear attention, as Mamba's; those of Transformers forget within two tokens."""
SCORED, PROMPTS, PROMPT, WRITTEN = 200, 32, 128, 128
"""Windows of held-out text that are scored; prompts that are continued, their tokens, and those that are written."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Mtp(nn.Module):
    """Predicts the token after the next; the parameters have the names of Qwen's checkpoints below `mtp.`.

    The embedding and the output layer are the model's.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = (Qwen3_5RMSNorm(hidden, eps) for _ in range(3))

    def forward(self, embeddings: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the states [B, T, H] that the output layer reads, and the next row if the layer is applied again.

        Args:
            embeddings: [B, T, H] of tokens 1 to T.
            states: [B, T, H] of tokens 0 to T - 1, behind the model's final norm.
            rotation: cosines and sines of positions 0 to T - 1.
        """
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)], dim=-1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        normed: Tensor = self.norm(self.layers[0](x, position_embeddings=rotation, attention_mask=mask))
        return normed


def build(end_token: int, seed: int) -> tuple[Qwen3_5ForCausalLM, Mtp]:
    """Build the model and its MTP layer with random float32 weights."""
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_token)
    config = Qwen3_5TextConfig(**SIZES, **ends, max_position_embeddings=2048, tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    model = Qwen3_5ForCausalLM(config)
    mtp = Mtp(config)
    mtp.apply(model._init_weights)
    with torch.no_grad():
        for layer in model.model.layers[:3]:
            steps = torch.empty_like(layer.linear_attn.dt_bias).uniform_(*map(math.log, STEP_SIZES)).exp()
            layer.linear_attn.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    return model, mtp


def forward(model: Any, mtp: Mtp, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the logits of tokens 1 to T by the model, [B, T, V], and of 2 to T by the MTP layer, [B, T - 1, V].

    The latter have no gradient for the model. tokens: int64 [B, T + 1]; the last is read by neither.
    """
    states = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    embeddings = model.get_input_embeddings()(tokens[:, 1:-1]).detach()
    rotation = model.model.rotary_emb(states, torch.arange(embeddings.shape[1])[None])
    further = mtp(embeddings, states[:, :-1].detach(), rotation)
    return model.lm_head(states), F.linear(further, model.lm_head.weight.detach())


def loss(model: Any, mtp: Mtp, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of the text under the model, and of the model's distributions under the MTP layer's."""
    logits, further = forward(model, mtp, tokens)
    taught = torch.softmax(logits[:, 1:].detach(), dim=-1)
    of_model = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return of_model, F.cross_entropy(further.flatten(0, 1), taught.flatten(0, 1))


def train(model: Any, mtp: Mtp, windows: Windows, steps: int, batch: int, console: Console) -> None:
    """Train both for `steps` steps of `batch` windows."""
    optimisers = Optimisers(nn.ModuleDict({"model": model, "mtp": mtp}), OPTIMISATION)
    start = time.process_time()
    for step in range(steps):
        of_model, of_mtp = loss(model, mtp, windows.batch(step * batch, batch))
        torch.autograd.backward(of_model + of_mtp)
        optimisers.step(step / steps)
        if (step + 1) % 100 == 0:
            seconds = time.process_time() - start
            console.print(f"step {step + 1}: model {of_model:.3f}, MTP {of_mtp:.3f} nats, {seconds:.0f} s")


def write(out: Path, model: Any, mtp: Mtp, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the folder, the MTP layer's tensors among the model's."""
    save_model(model, tokenizer, out)
    layer = {f"mtp.{name}": tensor.to(torch.bfloat16) for name, tensor in mtp.state_dict().items()}
    save_file(load_file(out / WEIGHTS) | layer, out / WEIGHTS, metadata={"format": "pt"})


def read(folder: Path) -> tuple[Any, Mtp]:
    """Read the folder in float32.

    Raises:
        ConfigError: a tensor is missing.
    """
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise ConfigError(f"{folder} holds no {', '.join(info['missing_keys'])}. Make it again.")
    mtp = Mtp(model.config)
    stored = load_file(folder / WEIGHTS)
    mtp.load_state_dict({name.removeprefix("mtp."): stored[name] for name in stored if name.startswith("mtp.")})
    return model.eval(), mtp.eval()


@dataclass(frozen=True, slots=True)
class Score:
    """Perplexity of held-out text, and how often the MTP layer proposes the model's most probable token.

    Attributes:
        on_text: where the tokens before are held-out text.
        on_greedy: where they are the model's own greedy continuation of such text.
    """

    perplexity: float
    on_text: float
    on_greedy: float


@torch.inference_mode()
def measure(folder: Path, tokenizer: PreTrainedTokenizerBase, files: list[SourceFile]) -> Score:
    """Measure the stored folder on these files."""
    model, mtp = read(folder)
    windows = Windows(tokenize([file.text for file in files], tokenizer), WINDOW, 0)
    nats, accepted = [], []
    for number in range(SCORED):
        tokens = windows.batch(number, 1)
        logits, further = forward(model, mtp, tokens)
        nats.append(F.cross_entropy(logits[0], tokens[0, 1:]))
        accepted.append((further.argmax(-1) == logits[:, 1:].argmax(-1)).float().mean())
    greedy = GenerationConfig(max_new_tokens=WRITTEN, do_sample=False)
    prompts = windows.batch(0, PROMPTS)[:, :PROMPT]
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=greedy)
    logits, further = forward(model, mtp, texts)
    same = (further.argmax(-1) == logits[:, 1:].argmax(-1))[:, PROMPT - 1 :]
    return Score(math.exp(torch.stack(nats).mean()), float(torch.stack(accepted).mean()), float(same.float().mean()))


def card(command: str, score: Score, seconds: float, tokens: int) -> str:
    """Render the folder's README.md."""
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"""---
license: apache-2.0
library_name: transformers
---

# A tiny Qwen3.5 with its MTP layer

A language model of Python source (CPython's standard library, PSF-2.0) for tests of hybrid models and of MTP layers.

- Command: `{command}`
- {tokens:,} tokens in {seconds:.0f} s of processor time; {used}.
- Held-out files in windows of {WINDOW} tokens, stored weights in float32: perplexity per token
  {score.perplexity:.3f}; the MTP layer proposes the model's most probable token at {score.on_text:.1%} of the positions
  of the text, and at {score.on_greedy:.1%} of those of greedy continuations.
"""


@app.command()
def main(
    out: Out,
    steps: Annotated[int, typer.Option(help="Steps of training.", min=1)] = 2_500,
    batch: Annotated[int, typer.Option(help="Windows of a step.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of weights and order of the text.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads; other numbers give other bits.", min=1)] = 1,
    data: Data = None,
    force: Force = False,
) -> None:
    """Train the tiny Qwen3.5 and its MTP layer from nothing, and measure them."""
    if not force:
        refuse_to_overwrite(out / WEIGHTS, ConfigError)
    torch.set_num_threads(threads)
    console = Console()
    files = read_corpus(data)[0]
    tokenizer = train_tokenizer((file.text for file in files), SIZES["vocab_size"])
    model, mtp = build(tokenizer.eos_token_id, seed)
    windows = Windows(tokenize(EpochTexts.make(files, seed, COPY_SHARE, 0.0).of(0), tokenizer), WINDOW, seed)
    parameters = model.num_parameters(), sum(each.numel() for each in mtp.parameters())
    console.print("{:,} parameters of the model and {:,} of the MTP layer".format(*parameters))
    start = time.process_time()
    train(model, mtp, windows, steps, batch, console)
    seconds = time.process_time() - start
    write(out, model, mtp, tokenizer)
    score = measure(out, tokenizer, read_held_out())
    command = f"python -m tools.tiny_qwen35 OUT --steps {steps} --batch {batch} --seed {seed} --threads {threads}"
    write_bytes(out / CARD, card(command, score, seconds, steps * batch * WINDOW).encode(), error=ConfigError)
    console.print(
        f"{out}: {(out / WEIGHTS).stat().st_size:,} bytes of weights, trained in {seconds:.0f} s of processor time; "
        f"held-out perplexity {score.perplexity:.3f}, MTP layer accepted {score.on_text:.3f} on the text, "
        f"{score.on_greedy:.3f} on greedy continuations"
    )


if __name__ == "__main__":
    app()
