"""From config.json of a public EAGLE head to the shape of ours.

EAGLE-1 and EAGLE-3 heads have a Llama configuration with further keys; the `speculators` form has it as
`transformer_layer_config`, the further keys beside it.
"""

from __future__ import annotations

from forerun.drafters.eagle.config import EagleConfig
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.utils.foreign_errors import REMEDY
from forerun.utils.json_file import Fields

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = "speculators_model_type"
_OTHER_HEAD = "Give one that has it otherwise, or train one: forerun train eagle."
_UNSERVED = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("qkv_bias", False),
    ("mlp_bias", False),
    ("logit_scale", 1),
    ("partial_rotary_factor", 1),
    ("norm_before_fc", False),
    ("is_causal", True),
    ("parallel_drafting", False),
)
"""Keys and the one value that is served; a key that is not there has it."""


def public_config(settings: Fields, *, version: int, has_output_rows: bool, num_layers: int | None) -> EagleConfig:
    """Return the configuration of a public EAGLE head.

    Args:
        version: 1 or 3, as the names of its tensors tell.
        has_output_rows: whether it has a tensor lm_head.weight.
        num_layers: of the target; None if that is not known.

    Raises:
        ModelLoadError: a key is missing or wrong.
        UnsupportedModelError: it asks for what is not served, or cannot be read without `num_layers`.
    """
    layer = _layer(settings)
    for fields in (settings, layer):
        _refuse_unserved(fields)
    hidden, vocab = layer.integer("hidden_size", low=1), layer.integer("vocab_size", low=1)
    heads = layer.integer("num_attention_heads", low=1)
    flags = _flags(settings) if version == 3 else {}
    try:
        return EagleConfig(
            version=version,
            vocab_size=vocab,
            draft_vocab_size=settings.integer("draft_vocab_size", vocab, low=1) if version == 3 else vocab,
            hidden_size=hidden,
            target_hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=layer.integer("num_key_value_heads", heads, low=1),
            head_dim=layer.integer("head_dim", hidden // heads, low=1),
            intermediate_size=layer.integer("intermediate_size", low=1),
            layers=_layers(settings, num_layers) if version == 3 else (_needed(settings, num_layers),),
            own_output_rows=has_output_rows,
            sliding_window=_window(layer),
            rope_theta=rope_theta(layer),
            rms_norm_eps=layer.number("rms_norm_eps", 1e-6, low=0),
            max_positions=layer.integer("max_position_embeddings", 2048, low=1),
            **flags,
        )
    except ConfigError as failure:
        raise ModelLoadError(f"{settings.place}: {failure} {REMEDY}") from None


def _layer(settings: Fields) -> Fields:
    """Return the Llama configuration of the head's layer."""
    if SPECULATORS not in settings.values:
        layer = settings
    else:
        kind = settings.string(SPECULATORS)
        if kind != "eagle3":
            raise UnsupportedModelError(
                f"{settings.place}: {SPECULATORS} is {kind[:40]!r}, and of these heads only 'eagle3' is served. "
                f"{_OTHER_HEAD}"
            )
        layer = settings.fields("transformer_layer_config")
    kind = layer.string("model_type", "llama")
    if kind != "llama":
        raise UnsupportedModelError(
            f"{layer.place}: model_type is {kind[:40]!r}, and heads are served whose layer is a Llama layer. "
            f"{_OTHER_HEAD}"
        )
    count = layer.integer("num_hidden_layers", 1)
    if count != 1:
        raise UnsupportedModelError(
            f"{layer.place}: the head has {count} layers, and heads of one layer are served. {_OTHER_HEAD}"
        )
    return layer


def _refuse_unserved(fields: Fields) -> None:
    for key, served in _UNSERVED:
        value = fields.values.get(key)
        if value is not None and value != served:
            raise UnsupportedModelError(
                f"{fields.place}: {key} is {str(value)[:40]}, and only {served} is served. {_OTHER_HEAD}"
            )
    eagle: Fields | None = fields.fields("eagle_config", None)
    if eagle is not None:
        _refuse_unserved(eagle)
        if not eagle.flag("use_aux_hidden_state", True):
            raise UnsupportedModelError(
                f"{eagle.place}: use_aux_hidden_state is false, and EAGLE-3 heads that fuse no states are not served. "
                f"{_OTHER_HEAD}"
            )
    width = fields.integer("target_hidden_size", None)
    if width is not None and width != fields.values.get("hidden_size", width):
        raise UnsupportedModelError(
            f"{fields.place}: the head is {fields.values['hidden_size']} wide and its target {width}, so that it needs "
            f"embeddings of its own, which are not served. {_OTHER_HEAD}"
        )


def _flags(settings: Fields) -> dict[str, bool]:
    if SPECULATORS in settings.values:
        residual = settings.flag("norm_before_residual")  # programs differ in what they take it for where it is missing
    else:
        residual = settings.flag("norm_before_residual", False)
    return {
        "norm_before_fc": settings.flag("fc_norm", False),
        "norm_before_residual": residual,
        "norm_output": settings.flag("norm_output", False),
    }


def _layers(settings: Fields, num_layers: int | None) -> tuple[int, ...]:
    """Return the layers whose inputs are fused. Where none are named they are EAGLE's: 2, L // 2, L - 3."""
    eagle: Fields | None = settings.fields("eagle_config", None)
    found = settings.list_of(LAYER_IDS, int, None)
    if not found and eagle is not None:
        found = eagle.list_of(LAYER_IDS, int, None)
    if not found:
        count = _needed(settings, num_layers)
        found = [2, count // 2, count - 3]
    layers = tuple(sorted(found))
    if layers[0] < 0:
        raise ModelLoadError(f"{settings.place}: the head reads the state of layer {layers[0]}. {REMEDY}")
    if num_layers is not None and layers[-1] >= num_layers:
        raise UnsupportedModelError(
            f"{settings.place}: the head reads the state of layer {layers[-1]}, and the target has {num_layers}. What "
            f"leaves its last layer is at hand after the final norm only. {_OTHER_HEAD}"
        )
    return layers


def _needed(settings: Fields, num_layers: int | None) -> int:
    if num_layers is None:
        raise ModelLoadError(
            f"{settings.place}: which states of its target the head reads depends on the target's number of layers. "
            "Give the target too."
        )
    return num_layers


def _window(layer: Fields) -> int | None:
    """Return the number of rows that a row attends to; None for all. As in Transformers, `layer_types` decides."""
    kinds: list[str] | None = layer.list_of("layer_types", str, None)
    if not kinds:
        return None
    if len(kinds) > 1 or kinds[0] not in ("full_attention", "sliding_attention"):
        raise layer.wrong("layer_types", "['full_attention'] or ['sliding_attention']")
    return layer.integer("sliding_window", low=1) if kinds[0] == "sliding_attention" else None


def rope_theta(layer: Fields) -> float:
    """Return the base of a plain rotation. Raises UnsupportedModelError for another kind."""
    for key in ("rope_parameters", "rope_scaling"):
        scaling: Fields | None = layer.fields(key, None)
        if scaling is None:
            continue
        kind = scaling.string("rope_type", None) or scaling.string("type", None) or "default"
        if kind != "default":
            raise UnsupportedModelError(
                f"{scaling.place}: rope_type is {kind[:40]!r}, and heads with plain rotation are served. {_OTHER_HEAD}"
            )
        if "rope_theta" in scaling.values:
            return scaling.number("rope_theta", low=1)
    return layer.number("rope_theta", 10_000.0, low=1)
