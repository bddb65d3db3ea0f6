"""Tiny models in the layouts in which other programs publish quantized weights, packed here value by value as their
documents say, and the models of Transformers with the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from families import tiny_model

Tensors = dict[str, Tensor]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4 = torch.tensor(
    [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407]
)
_NF4 = torch.cat([_NF4, torch.tensor([0.5626, 0.723, 1.0])])


class Publication(NamedTuple):
    """A layout.

    Attributes:
        config: quantization_config.
        pack: module's path, weight [out, in] -> its tensors by name, and the numbers that they stand for.
        served: what the native decoder computes with, `LanguageModel.quantize`; None: numbers.
        family: a key of families.TINY.
    """

    config: dict[str, Any]
    pack: Callable[[str, Tensor], tuple[Tensors, Tensor]]
    served: str | None
    family: str = "llama"


class Rounded(NamedTuple):
    """A weight [out, in] as codes, and zeros and scales [out, groups]."""

    codes: Tensor
    zeros: Tensor
    scale: Tensor

    def numbers(self, place: Tensor | None = None) -> Tensor:
        """place: the group of each input."""
        width = self.codes.shape[1]
        place = torch.arange(width) // (width // self.scale.shape[1]) if place is None else place
        return (self.codes - self.zeros[:, place]) * self.scale.float()[:, place]


def rounded(
    weight: Tensor, bits: int, group: int, dtype: torch.dtype, *, symmetric: bool, order: Tensor | None = None
) -> Rounded:
    """Round to nearest. order: of the inputs, whose groups follow it."""
    out, width = weight.shape
    ordered = weight if order is None else weight[:, order]
    groups = ordered.view(out, -1, group if group > 0 else width)
    most = 2**bits - 1
    if symmetric:
        scale = (groups.abs().amax(-1) / (most // 2)).to(dtype)
        zeros = torch.full(scale.shape, 2 ** (bits - 1))
    else:
        least = groups.amin(-1).clamp(max=0)
        scale = ((groups.amax(-1).clamp(min=0) - least) / most).to(dtype)
        zeros = (-least / scale.float()).round().clamp(0, most).long()
    codes = (groups / scale.float()[..., None]).round().long() + zeros[..., None]
    codes = codes.clamp(0, most).view(out, width)
    return Rounded(codes if order is None else codes[:, order.argsort()], zeros, scale)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack rows of codes into int32, the first lowest, or in this order."""
    per = 32 // bits
    order = order or tuple(range(per))
    short = -codes.shape[1] % per
    codes = torch.nn.functional.pad(codes.long(), (0, short)).view(len(codes), -1, per)
    packed = sum(codes[..., index] << bits * place for place, index in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, version: str = "gptq") -> Publication:
    """As AutoGPTQ and GPTQModel save: words along the inputs; zeros of the first version lack one."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        width = weight.shape[1]
        order = torch.randperm(width, generator=torch.Generator().manual_seed(1)) if act_order else None
        found = rounded(weight, bits, group, torch.float16, symmetric=symmetric, order=order)
        place = torch.arange(width) // (group if group > 0 else width)
        place = place if order is None else place[order.argsort()]
        lacking = sum(2**shift for shift in range(0, 32, bits)) if version == "gptq" else 0
        tensors = {
            "qweight": words(found.codes, bits).T,
            "qzeros": words(found.zeros.T, bits) - lacking,
            "scales": found.scale.T,
            "g_idx": place.int(),
        }
        return {f"{path}.{key}": each for key, each in tensors.items()}, found.numbers(place)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
    return Publication({**config, "checkpoint_format": version}, pack, None if act_order else "gptq")


def awq(group: int) -> Publication:
    """As AutoAWQ's "gemm": words along the outputs, whose halves of bytes are of outputs 0, 2, 4, 6, 1, 3, 5, 7."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        found, order = rounded(weight, 4, group, torch.float16, symmetric=False), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(found.codes.T, 4, order),
            "qzeros": words(found.zeros.T, 4, order),
            "scales": found.scale.T,
        }
        return {f"{path}.{key}": each for key, each in tensors.items()}, found.numbers()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Publication(config, pack, "awq")


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compressed(bits: int, group: int, *, symmetric: bool) -> Publication:
    """As compressed-tensors' "pack-quantized": words along the inputs, of zeros along the outputs; bfloat16 scales."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        found = rounded(weight, bits, group, torch.bfloat16, symmetric=symmetric)
        tensors = {"packed": words(found.codes, bits), "scale": found.scale, "shape": torch.tensor(weight.shape)}
        if not symmetric:
            tensors["zero_point"] = words(found.zeros.T, bits).T
        return {f"{path}.weight_{key}": each for key, each in tensors.items()}, found.numbers()

    strategy = "group" if group > 0 else "channel"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return Publication(_compressed("pack-quantized", weights), pack, "compressed-tensors")


def compressed_int8() -> Publication:
    """As compressed-tensors' "int-quantized", W8A8: signed bytes with a scale for each output."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        found = rounded(weight, 8, -1, torch.float32, symmetric=True)
        tensors = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scale}
        return {f"{path}.{key}": each for key, each in tensors.items()}, found.numbers()

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return Publication(
        _compressed("int-quantized", weights, {**weights, "strategy": "token"}), pack, "compressed-tensors"
    )


def llm_int8() -> Publication:
    """As bitsandbytes' LLM.int8(): SCB holds the largest magnitude of each output."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {f"{path}.{key}": each for key, each in tensors.items()}, codes * (largest / 127)[:, None]

    return Publication({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack, "bitsandbytes")


def nf4() -> Publication:
    """As bitsandbytes' NF4 with scales quantized again: the first of two places in the high half of a byte."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        offset, table = float(largest.mean()), torch.linspace(-1, 1, 256)
        wide = torch.stack([part.abs().amax() for part in (largest - offset).split(256)])
        each = wide.repeat_interleave(256)[: len(largest)]
        places = ((largest - offset) / each)[:, None].sub(table).abs().argmin(1)
        scale = table[places] * each + offset
        codes = (blocks / scale[:, None])[..., None].sub(_NF4).abs().argmin(-1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        flat = codes.flatten().to(torch.uint8)
        tensors = {
            "": (flat[::2] << 4 | flat[1::2])[:, None],
            ".absmax": places.to(torch.uint8),
            ".quant_map": _NF4.clone(),
            ".nested_absmax": wide,
            ".nested_quant_map": table,
            ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        numbers = (_NF4[codes] * scale[:, None]).view(weight.shape)
        return {f"{path}.weight{key}": each for key, each in tensors.items()}, numbers

    return Publication({"quant_method": "bitsandbytes", "load_in_4bit": True}, pack, None)


def float8(block: int) -> Publication:
    """As DeepSeek's FP8 in square blocks; with block 0 one scale for each tensor."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        out, width = weight.shape
        size = block or max(out, width)
        rows, columns = -(-out // size), -(-width // size)
        scale = torch.empty(rows, columns)
        numbers, codes = torch.empty(weight.shape), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                part = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
                scale[row, column] = weight[part].abs().amax() / 448
                codes[part] = (weight[part] / scale[row, column]).to(torch.float8_e4m3fn)
                numbers[part] = codes[part].float() * scale[row, column]
        key = "weight_scale_inv" if block else "weight_scale"
        return {f"{path}.weight": codes, f"{path}.{key}": scale if block else scale.view(())}, numbers

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Publication(config | ({"weight_block_size": [block, block]} if block else {}), pack, None)


def nvfp4() -> Publication:
    """As compressed-tensors' "nvfp4-pack-quantized": E2M1, the first in the low half of a byte, a scale for sixteen."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.view(len(weight), -1, 16)
        whole = 448 * 6 / weight.abs().amax().view(1)
        scale = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        step = (scale.float() / whole)[..., None]
        codes = (groups / step)[..., None].sub(_E2M1).abs().argmin(-1)
        flat = codes.view(weight.shape).to(torch.uint8)
        tensors = {"packed": flat[:, ::2] | flat[:, 1::2] << 4, "scale": scale, "global_scale": whole}
        return {f"{path}.weight_{key}": each for key, each in tensors.items()}, (_E2M1[codes] * step).view(weight.shape)

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return Publication(_compressed("nvfp4-pack-quantized", weights), pack, None)


def hqq() -> Publication:
    """As HQQ: groups are rows; the first half of them lies in high halves of bytes."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.reshape(-1, 64)
        least = groups.amin(1, keepdim=True)
        scale = (groups.amax(1, keepdim=True) - least) / 15
        codes, zero = ((groups - least) / scale).round(), -least / scale
        half, packed = len(codes) // 2, codes.to(torch.uint8)
        tensors = {
            "W_q": packed[:half] << 4 | packed[half:],
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor(weight.shape),
            "nbits": torch.tensor(4, dtype=torch.int32),
            "axis": torch.tensor(1, dtype=torch.int32),
        }
        return {f"{path}.{key}": each for key, each in tensors.items()}, ((codes - zero) * scale).view(weight.shape)

    return Publication({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, pack, None)


def torchao_int8() -> Publication:
    """As torchao's Int8Tensor: bytes, a scale and a zero for each output."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        found = rounded(weight, 8, -1, torch.float32, symmetric=True)
        zeros = torch.zeros(found.scale.shape, dtype=torch.int8)
        tensors = {"qdata": (found.codes - 128).to(torch.int8), "scale": found.scale, "zero_point": zeros}
        return {f"{path}._weight_{key}": each for key, each in tensors.items()}, found.numbers()

    return Publication({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8"}}}, pack, "torchao")


def mxfp4() -> Publication:
    """As GPT-OSS: E2M1 in bytes, the first in the low half, and an exponent for 32 inputs, of all experts in one."""

    def pack(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:  # [experts, in, out], as Transformers has it
        groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
        exponent = (groups.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
        step = torch.exp2(exponent)[..., None]
        codes = (groups / step)[..., None].sub(_E2M1).abs().argmin(-1)
        flat = codes.to(torch.uint8)
        numbers = (_E2M1[codes] * step).flatten(2).transpose(1, 2)
        blocks = flat[..., ::2] | flat[..., 1::2] << 4
        return {f"{path}_blocks": blocks, f"{path}_scales": (exponent + 127).to(torch.uint8)}, numbers

    return Publication({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, pack, "mxfp4", "gpt_oss")


PUBLICATIONS: dict[str, Publication] = {
    "GPTQ, 4 bits": gptq(4, 128, symmetric=True),
    "GPTQ, 4 bits, zeros": gptq(4, 32, symmetric=False, version="gptq_v2"),
    "GPTQ, 2 bits": gptq(2, 64, symmetric=False),
    "GPTQ, 8 bits": gptq(8, -1, symmetric=True),
    "GPTQ, act-order": gptq(4, 64, symmetric=False, act_order=True),
    "AWQ": awq(64),
    "W4A16": compressed(4, 128, symmetric=True),
    "W4A16, zeros": compressed(4, 32, symmetric=False),
    "W8A16, zeros": compressed(8, -1, symmetric=False),
    "W8A8": compressed_int8(),
    "LLM.int8()": llm_int8(),
    "torchao int8": torchao_int8(),
    "MXFP4": mxfp4(),
    "FP8 in blocks": float8(96),
    "FP8": float8(0),
    "NVFP4": nvfp4(),
    "NF4": nf4(),
    "HQQ": hqq(),
}
"""By name, the layouts of the table in docs/models.md."""


def publish(name: str, folder: Path, seed: int = 0) -> tuple[Path, PreTrainedModel]:
    """Save a tiny model in a layout, and return the folder and the model with the numbers that it stands for."""
    publication = PUBLICATIONS[name]
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model, tensors = tiny_model(publication.family, seed, **wide), dict[str, Tensor]()
    path = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    model.save_pretrained(path)
    is_mixture = publication.family == "gpt_oss"
    for key, parameter in model.state_dict().items():
        wanted = (
            key.endswith(("gate_up_proj", "down_proj")) if is_mixture else ".layers." in key and parameter.dim() == 2
        )
        if not wanted:
            tensors[key] = parameter.detach().clone()
            continue
        packed, numbers = publication.pack(key.removesuffix(".weight"), parameter.detach())
        tensors |= {each: tensor.contiguous().clone() for each, tensor in packed.items()}
        parameter.copy_(numbers)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": publication.config}
    (path / "config.json").write_text(json.dumps(config))
    return path, model
