"""What the native kernels are given, as text: fields by name, pointers by what they point to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from golden import names
from golden.sources import Numbers, Sources, digest, rounded

_HIDDEN = ("input_norm", "mlp_norm", "attention_norm", "feed_norm", "token_norm", "input_bias", "mlp_bias")
_NUMBERS: Mapping[str, str] = {
    **{f"layer.{name}": "hidden" for name in _HIDDEN},
    "layer.query_norm": "queries",
    "layer.key_norm": "keys",
    "layer.value_norm": "head_dim",
    "layer.curve": "3",
    "layer.sinks": "num_heads",
    "layer.output_scale": "1",
    "model.norm": "hidden",
    "model.norm_bias": "hidden",
    "latent.entry_norm": "entry",
    "latent.norm": "value_width",
    "experts.bias": "experts",
    "experts.curve": "2",
    "experts.share_scales": "experts",
    **{f"experts.{name}": "hidden" for name in ("router_norm", "norm", "shared_norm", "mixed_norm")},
    "recurrence.taps_bias": "channels",
    **{f"recurrence.{name}": "states" for name in ("rate", "step_bias", "skip")},
    "recurrence.norm": "wide",
}
"""Pointers to numbers, and how many there are, as `_sizes` says it."""
_ARRAYS = {f"experts.{name}": "experts" for name in ("gate", "up", "down")}
_ARRAYS |= {"latent.absorb": "num_heads", "latent.expand": "num_heads"}
"""Pointers to linear layers."""
_INTEGERS = (ctypes.c_int32, ctypes.c_int64)


class Dump:
    """Texts of a decoder's structures.

    Args:
        sources: of the model's files.
        is_brief: formats and shapes alone.
    """

    def __init__(self, decoder: Any, sources: Sources, *, is_brief: bool = False) -> None:
        self._library, self._sources, self._is_brief = names.library(decoder), sources, is_brief
        self._struct, self._decoder = names.structure(decoder), decoder

    def model(self) -> dict[str, str]:
        """Return the model's fields."""
        fields = dict(self._fields("model", self._struct, self._sizes()))
        return {"embedding": self._linear(names.embedding(self._decoder)), **fields}

    def layers(self) -> list[dict[str, str]]:
        """Return each layer's fields, those of what it points to behind its name and a point."""
        return [
            _without(f"layers.{index}.", f"blk.{index}.", f"h.{index}.", fields=self._layer(layer))
            for index, layer in enumerate(names.layers(self._decoder))
        ]

    def _layer(self, layer: ctypes.Structure) -> dict[str, str]:
        return dict(self._fields("layer", layer, self._sizes(layer)))

    def _sizes(self, layer: ctypes.Structure | None = None) -> dict[str, int]:
        """Return how many numbers there are of each kind."""
        found = {str(count): count for count in range(1, 4)}
        found |= {name: names.value("model", self._struct, name) for name in ("hidden", "num_heads")}
        if layer is None:
            return found
        for name in ("num_kv_heads", "head_dim", "value_width"):
            found[name] = names.value("layer", layer, name)
        is_wide = names.value("model", self._struct, "has_wide_norms")
        found["queries"] = found["head_dim"] * (found["num_heads"] if is_wide else 1)
        found["keys"] = found["head_dim"] * (found["num_kv_heads"] if is_wide else 1)
        return found

    def _fields(self, of: str, struct: ctypes.Structure, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield name and text of each field that is not zero."""
        sizes = {**sizes, **_own_sizes(of, struct)}
        fields: Any = struct._fields_
        for now, kind in sorted(fields, key=lambda field: names.golden_name(of, field[0])):
            name, value = names.golden_name(of, now), getattr(struct, now)
            place = f"{of}.{name}"
            if kind is names.LINEAR:
                if value.packed:
                    yield name, self._linear(value)
            elif not value or name == "reserved" or place == "model.layers":
                continue
            elif kind in _INTEGERS:
                yield name, str(value)
            elif kind is ctypes.c_float:
                yield name, str(np.float32(value))
            elif place in names.BELOW:
                below, type_ = names.BELOW[place]
                there = ctypes.cast(value, ctypes.POINTER(type_)).contents
                yield from ((f"{below}.{each}", text) for each, text in self._fields(below, there, sizes))
            elif place in _ARRAYS:
                yield name, self._array(value, sizes[_ARRAYS[place]])
            elif place == "recurrence.taps":
                yield name, self._taps(value, sizes)
            elif place in _NUMBERS:
                yield name, self._numbers(value, sizes[_NUMBERS[place]])
            else:
                yield name, "set"

    def _numbers(self, address: int, count: int) -> str:
        if self._is_brief:
            return str(count)
        numbers = _floats(address, count)
        return f"{count}: {self._sources.of_vector(numbers)}"

    def _taps(self, address: int, sizes: Mapping[str, int]) -> str:
        """Return the text of a convolution's numbers, [taps, channels]."""
        count, channels = sizes["taps"], sizes["channels"]
        if self._is_brief:
            return f"{count}x{channels}"
        numbers = _floats(address, count * channels).reshape(count, channels)
        where, is_exact = self._sources.of_matrix(numbers)
        return f"{count}x{channels}: {where}" + ("" if is_exact else f" numbers {rounded(numbers)}")

    def _array(self, address: int, count: int) -> str:
        """Return the text of several layers, once if they differ by their number alone."""
        pointer = ctypes.cast(address, ctypes.POINTER(names.LINEAR))
        found = [self._linear(pointer[index]) for index in range(count)]
        alike = {
            text.replace(f"[{index}]", "[*]").replace(f"experts.{index}.", "experts.*.")
            for index, text in enumerate(found)
        }
        return f"{count} x {alike.pop()}" if len(alike) == 1 else f"{count} x | " + " | ".join(found)

    def _linear(self, struct: Any) -> str:
        kind, out, width = names.kind_name(struct.kind), struct.out_features, struct.in_features
        text = f"{kind} {out}x{width}"
        text += f" activations {struct.activation_bits}" if struct.activation_bits else ""
        text += f" span {struct.span}" if struct.span != 1 else ""
        if self._is_brief:
            return text + (" bias" if struct.bias else "")
        where, is_exact = self._sources.of_matrix(self._unpacked(struct))
        text += f": {where}" + ("" if is_exact else f" {self._packed_digest(struct)}")
        return text + (f"; bias {self._sources.of_vector(_floats(struct.bias, out))}" if struct.bias else "")

    def packed_digest(self) -> str:
        """Return a digest of all packed weights of the layers and of the output layer."""
        found = [self._packed_digest(struct) for layer in names.layers(self._decoder) for struct in self._all(layer)]
        return digest(" ".join([*found, self._packed_digest(names.value("model", self._struct, "head"))]).encode())

    def _all(self, struct: Any) -> Iterator[Any]:
        """Yield the linear layers of a layer, in the order of their golden names."""
        waiting = [("layer", struct)]
        while waiting:
            of, each = waiting.pop(0)
            for now, kind in sorted(each._fields_, key=lambda field: names.golden_name(of, field[0])):
                place, value = f"{of}.{names.golden_name(of, now)}", getattr(each, now)
                if kind is names.LINEAR and value.packed:
                    yield value
                elif place in names.BELOW and value:
                    below, type_ = names.BELOW[place]
                    waiting.append((below, ctypes.cast(value, ctypes.POINTER(type_)).contents))
                elif place in _ARRAYS and value and place.startswith("experts."):
                    count = names.value("experts", each, "count")
                    pointer = ctypes.cast(value, ctypes.POINTER(names.LINEAR))
                    yield from (pointer[index] for index in range(count))

    def _packed_digest(self, struct: Any) -> str:
        nbytes = self._library.packed_bytes(struct.kind, struct.out_features, struct.in_features, struct.span)
        return digest(ctypes.string_at(struct.packed, nbytes))

    def _unpacked(self, struct: Any) -> Numbers:
        numbers = np.empty((struct.out_features, struct.in_features), np.float32)
        index = np.arange(struct.out_features, dtype=np.int64)
        self._library.unpack(ctypes.byref(struct), index.ctypes.data, len(index), numbers.ctypes.data)
        return numbers


def _own_sizes(of: str, struct: ctypes.Structure) -> dict[str, int]:
    """Return the counts that a structure says of itself."""
    if of == "experts":
        return {"experts": names.value(of, struct, "count")}
    if of == "latent":
        return {"entry": names.value(of, struct, "entry").out_features}
    if of == "recurrence":
        channels, heads = names.value(of, struct, "channels"), names.value(of, struct, "heads")
        wide = heads * names.value(of, struct, "value_width") or channels
        return {"taps": names.value(of, struct, "num_taps"), "channels": channels, "states": heads, "wide": wide}
    return {}


def _floats(address: int, count: int) -> Numbers:
    return np.frombuffer(ctypes.string_at(address, 4 * count), np.float32)


def _without(*prefixes: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields without the layer's number in names of tensors, so that layers can be compared."""
    found = {}
    for name, text in fields.items():
        for prefix in prefixes:
            text = text.replace(prefix, "")
        found[name] = text
    return found
