"""From a folder or hub id to a Model. Weights come from safetensors only; no remote code is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from forerun.config import BUNDLED_MODELS, DEFAULT_DTYPE, DTYPES
from forerun.device import resolve_device
from forerun.errors import ConfigError, ForerunError, ModelLoadError, UnsupportedModelError
from forerun.models.exactness import probe, self_test
from forerun.models.general import ATTENTION_NAME, GeneralDecoder
from forerun.models.llama import LlamaDecoder, llama_refusal
from forerun.models.model import Decoder, Model

Kind = Literal["auto", "llama", "general"]
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def resolve(name: str | Path) -> str:
    """The folder of a bundled model, or the name itself."""
    return str(BUNDLED_MODELS.get(str(name), name))


def load_model(
    name: str | Path, dtype: str = DEFAULT_DTYPE, kind: Kind = "auto", device: str | torch.device = "cpu"
) -> Model:
    """Load a causal language model and try whether it is exact.

    Args:
        name: "bundled", "bundled-draft", a local folder, or a hub id.
        dtype: "float32", "bfloat16" or "float64".
        kind: of decoder: "llama" for the Llama family's fast one, "general" for Transformers' own modules,
            "auto" for the first where it serves the model.
        device: where the model computes: "cpu", "cuda", "cuda:1", "mps".

    Raises:
        ConfigError: unknown dtype or kind, the Llama decoder asked for a model it does not serve, or a device that is
            not there.
        ModelLoadError: the folder is missing, broken, or has only pickled weights.
        UnsupportedModelError: the architecture cannot be served exactly (named, with the reason).
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}.")
    if kind not in ("auto", "llama", "general"):
        raise ConfigError(f"kind is {kind!r}, but must be auto, llama or general.")
    place = resolve_device(device)
    folder = resolve(name)
    config = _load_config(folder, str(name))
    _refuse_unservable(config, str(name))
    refusal = llama_refusal(config)
    if kind == "llama" and refusal:
        raise ConfigError(f"the Llama decoder cannot serve {name}: {refusal}. Use kind='general'.")
    if kind == "auto":
        kind = "general" if refusal else "llama"
    hf = _load_weights(folder, str(name), config, getattr(torch, dtype), place)
    try:
        model = _assemble(hf, str(name), config, getattr(torch, dtype), kind, place)
        probe(model)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ForerunError):
            raise
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) could not compute one step in forerun: {error}. "
            "Serve it with Transformers, or report the architecture."
        ) from error
    model.exactness = self_test(model)
    return model


def _assemble(hf: nn.Module, name: str, config: Any, dtype: torch.dtype, kind: Kind, device: torch.device) -> Model:
    num_parameters = sum(p.numel() for p in hf.parameters())
    decoder: Decoder = LlamaDecoder(hf) if kind == "llama" else GeneralDecoder(hf)
    return Model(
        decoder,
        name=name,
        vocab_size=config.vocab_size,
        context_length=_context_length(config),
        eos_token_ids=_eos_token_ids(hf),
        dtype=dtype,
        device=device,
        num_parameters=num_parameters,
        kind=kind,
    )


def load_tokenizer(name: str | Path) -> Any:
    """The Transformers tokenizer that lies beside a model.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(name))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(
            f"no tokenizer could be read from {name}: {_first_line(error)}. "
            "Put tokenizer.json and tokenizer_config.json beside the weights, or pass token ids."
        ) from error


def _load_config(folder: str, name: str) -> Any:
    from transformers import AutoConfig

    path = Path(folder)
    if path.is_absolute() or folder.startswith((".", "~")) or path.exists():
        if not path.is_dir():
            raise ModelLoadError(f"model folder {name} does not exist. Give a folder with config.json, or a hub id.")
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"model folder {name} has no config.json. Give a Transformers model folder.")
        _refuse_pickles(path, name)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"the configuration of {name} cannot be read: {_first_line(error)}") from error
    return config.get_text_config(decoder=True)


def _refuse_pickles(path: Path, name: str) -> None:
    if any(path.glob("*.safetensors")):
        return
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern)]
    if pickles:
        raise ModelLoadError(
            f"model folder {name} has only pickled weights ({pickles[0]}), which can run code when loaded. "
            "Convert it: model.save_pretrained(folder) of a current Transformers writes safetensors."
        )
    raise ModelLoadError(f"model folder {name} has no *.safetensors weights.")


def _refuse_unservable(config: Any, name: str) -> None:
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder; forerun serves decoder-only models"
    foreign = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if foreign:
        reason = f"its layers of type {', '.join(sorted(foreign))} keep a state that cannot be rolled back"
    if reason:
        raise UnsupportedModelError(f"{name} ({config.model_type}) cannot be served: {reason}.")


def _load_weights(folder: str, name: str, config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{name} ({config.model_type}) has no causal language model in Transformers.")
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(cls, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) cannot be served: its recurrent state cannot be rolled back."
        )
    try:
        with without_bars():
            model, loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                experts_implementation="eager",
                use_safetensors=True,
                output_loading_info=True,
            )
        model.to(device)
    except ValueError as error:
        raise UnsupportedModelError(f"{name} ({config.model_type}) cannot be served: {_first_line(error)}") from error
    except (OSError, KeyError, RuntimeError, ImportError) as error:
        raise ModelLoadError(f"the weights of {name} cannot be read: {_first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.startswith("safetensors") or type(error).__name__ == "SafetensorError":
            raise ModelLoadError(f"the weights of {name} are damaged: {_first_line(error)}") from error
        raise
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise ModelLoadError(f"{name} lacks {len(missing)} weights, among them {missing[0]}: they would be random.")
    served: nn.Module = model.eval().requires_grad_(False)
    return served


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep Transformers' progress bars off the screen: they would run through ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _context_length(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        length = getattr(config, key, None)
        if length:
            return int(length)
    return 2**20


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation: Any = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
