"""The only module that lets Transformers read a model folder. It never runs code from a folder.

Configuration and weights are passed to Transformers as values (`source.py`, `weights.py`); it opens files for
tokenizers alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from forerun.config import BUNDLED_MODELS
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.families.table import refusal
from forerun.models.loading.folder import TEKKEN, TOKENIZER, TOKENIZER_CONFIG
from forerun.models.loading.tokenizer_trial import check_tokenizer
from forerun.models.loading.weights import Checkpoint, check_num_layers, check_numbers, check_shapes, check_unused
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.deferred import DeferredModule
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields, read_bytes
from forerun.utils.library_tokenizer import LibraryTokenizer
from forerun.utils.vocabulary import guarded

if TYPE_CHECKING:
    from forerun.models import general
else:
    general = DeferredModule("forerun.models.general")

_log = logging.getLogger(__name__)


def is_bundled(folder: Path) -> bool:
    """Return whether a folder is one of the package's own models: what Transformers would make of its files is known
    (`tests/unit/models/test_bundled_files.py`), and the import is spared."""
    return folder in BUNDLED_MODELS.values()


def read_folder_tokenizer(folder: Path, name: str, remedy: str) -> Any:
    """Return the tokenizer of a folder, which raises RequestError where it fails.

    Args:
        name: the name that the user gave. remedy: what to do where there is no tokenizer in it.

    Raises:
        ModelLoadError: it cannot be read or used, or needs code of the folder's.
    """
    path = folder / TOKENIZER
    is_own = is_bundled(folder)
    if path.exists() and not is_own:
        check_tokenizer(read_bytes(path, ModelLoadError, remedy=remedy), str(path), remedy)
    with as_load_errors(f"no tokenizer could be read from {name}", remedy):
        if is_own:
            tokenizer = _bundled_tokenizer(folder)
        elif (folder / TEKKEN).exists() and not path.exists():
            tokenizer = _read_tekken(folder / TEKKEN)
        else:
            tokenizer = _by_transformers(folder)
        if not is_own:  # its other files may hold values that are read when it is called
            tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])
    if not path.exists() and (made := getattr(tokenizer, "backend_tokenizer", None)):  # of a file in another format
        check_tokenizer(made.to_str().encode(), name, remedy)
    return guarded(tokenizer, name)


def _bundled_tokenizer(folder: Path) -> LibraryTokenizer:
    settings = Fields.read(folder / TOKENIZER_CONFIG, ModelLoadError).values
    named = {role: value for role, value in settings.items() if role.endswith("_token")}
    return LibraryTokenizer(
        Tokenizer.from_file(str(folder / TOKENIZER)), named, None, partial(_by_transformers, folder)
    )


def _by_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    # mistral_format: where mistral-common is installed, its tokenizer would be taken, which has no template
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, mistral_format=False)


def _read_tekken(path: Path) -> Any:
    """Return the tokenizer of Mistral's tekken.json. Its chat template lies beside it, or is made by mistral-common."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    tokenizer = convert_tekken_tokenizer(str(path))
    tokenizer.add_bos_token = True
    return tokenizer


def check_sentence_piece(path: Path) -> None:
    """Raise ModelLoadError if packages that Transformers reads a SentencePiece model with are not installed."""
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    needed = {"sentencepiece": is_sentencepiece_available(), "protobuf": is_protobuf_available()}
    if missing := [package for package, is_there in needed.items() if not is_there]:
        raise ModelLoadError(
            f"{path}: it is a SentencePiece model, which is read by the packages {' and '.join(needed)}, and "
            f"{' and '.join(missing)} cannot be imported. Install both: pip install 'forerun[sentencepiece]', or put "
            f"{TOKENIZER} beside it."
        )


def read_model(name: str, config: Any, checkpoint: Checkpoint, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return the Transformers model of a configuration, on the CPU, with a checkpoint's weights.

    Args:
        name: the name that the user gave.
        dtype: that the weights are brought to.
        attention: the name that its attention is registered by; None for Transformers' default.

    Raises:
        ModelLoadError: the weights are damaged or not those of the configuration.
        UnsupportedModelError: Transformers has no causal language model of the kind, or none with this attention.
    """
    cls = _model_class(name, config)
    kind = f"{name} ({config.model_type})"
    num_nextn = getattr(config, "num_nextn_predict_layers", None) or 0
    check_num_layers(checkpoint, config.num_hidden_layers, num_nextn, kind)
    options = _options(dtype, attention)
    check_shapes(checkpoint, _shapes(cls, config, options, kind, checkpoint), cls.base_model_prefix, kind)
    with as_load_errors(f"the weights of {name} cannot be read", REMEDY), quietly():
        model, loaded = cls.from_pretrained(
            None,
            config=config,
            state_dict=checkpoint.state_dict(dtype),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
    _check_loaded(checkpoint, model, loaded, kind)
    return model.eval().requires_grad_(False)


def empty_model(name: str, config: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return the model of `read_model` without weights: its tensors have shapes and dtypes, and take no memory.

    Raises:
        ModelLoadError: the configuration describes no model.
        UnsupportedModelError: Transformers has no causal language model of the kind.
    """
    cls = _model_class(name, config)
    what = f"{name} ({config.model_type}): its configuration describes no {cls.__name__}"
    with as_load_errors(what, REMEDY), quietly():
        return _empty(cls, config, _options(dtype, attention))


def round_parameters(model: Any, dtype: torch.dtype, spec: DecoderSpec | None, leave: Collection[str] = ()) -> Any:
    """Round the model's parameters to this dtype, except those that are kept in float32, and those named in `leave`.

    spec: of a model that the fused decoder computes.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and name not in leave and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype if spec is None else spec.dtype_in(name, dtype))
    model.config.dtype = dtype
    return model


def move_to_device(model: Any, device: torch.device) -> Any:
    """Move the model to a device. Placeholders (`Checkpoint.unread`) take no memory there either."""
    moved: dict[int, torch.nn.Parameter] = {}  # by id: a parameter that two modules share stays one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() and not any(parameter.stride()):
                if id(parameter) not in moved:
                    placeholder = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                    moved[id(parameter)] = torch.nn.Parameter(placeholder, requires_grad=False)
                setattr(module, name, moved[id(parameter)])
    return model.to(device)


def _model_class(name: str, config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{name} ({config.model_type}) has no causal language model in Transformers.")
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(cls, "_is_stateful", False) and refusal(config) is not None:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) cannot be served: its recurrent state cannot be rolled back."
        )
    return cls


def _options(dtype: torch.dtype, attention: str | None) -> dict[str, Any]:
    named = {}
    if attention is not None:
        general.register_attention()
        named = {"attn_implementation": attention}
    return {"dtype": dtype, "experts_implementation": "eager", **named}


def _empty(cls: Any, config: Any, options: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return cls._from_config(config, **options)


def _shapes(
    cls: Any, config: Any, options: dict[str, Any], kind: str, checkpoint: Checkpoint
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, without allocating them."""
    what = f"{kind}: {checkpoint.described_by} describes no {cls.__name__}"
    try:
        with as_load_errors(what, REMEDY):
            empty = _empty(cls, config, options)
            return {key: tuple(tensor.shape) for key, tensor in empty.state_dict().items()}
    except ModelLoadError as error:
        if isinstance(error.__cause__, KeyError) and error.__cause__.args == (options.get("attn_implementation"),):
            raise foreign_attention(kind) from None  # it looks the name up among classes of its own
        raise


def _check_loaded(checkpoint: Checkpoint, model: Any, loaded: dict[str, Any], name: str) -> None:
    """Raise ModelLoadError if tensors are missing, do not fit, or would change the model if they were used."""
    for tensor, found, expected in sorted(loaded["mismatched_keys"]):
        raise ModelLoadError(
            f"{name}: tensor {tensor} has shape {list(found)} in the weights, and {list(expected)} by "
            f"{checkpoint.described_by}. {checkpoint.remedy}"
        )
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise ModelLoadError(
            f"{name} lacks {len(missing)} weights, among them {missing[0]}: they would be random. {REMEDY}"
        )
    served = {path for path, _ in model.named_modules() if path}
    base = model.base_model_prefix + "."
    served |= {path.removeprefix(base) for path in served}
    check_numbers(checkpoint, loaded["unexpected_keys"], name)
    check_unused(checkpoint, loaded["unexpected_keys"], served, name)


def foreign_attention(kind: str) -> UnsupportedModelError:
    """Return the error for a class whose modules compute attention in code of their own."""
    return UnsupportedModelError(
        f"{kind} cannot be served: it does not compute attention through Transformers' attention interface. "
        "Serve it with Transformers."
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Silence Transformers' progress bars, which would mix with forerun's, and its load report, which repeats checks
    made here."""
    from transformers.utils import logging as of_transformers

    shown = of_transformers.is_progress_bar_enabled()
    level = of_transformers.get_verbosity()
    of_transformers.disable_progress_bar()
    of_transformers.set_verbosity_error()
    try:
        yield
    finally:
        of_transformers.set_verbosity(level)
        if shown:
            of_transformers.enable_progress_bar()
