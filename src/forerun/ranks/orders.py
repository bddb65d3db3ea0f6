"""What the leader tells the others, as bytes: plain values as JSON, and tensors as they lie in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.ranks.peers import Peers

FIRST = 16_384
"""Bytes of the first message of an order; most orders fit into it."""
_HEAD = 16
"""Bytes before the JSON: its length and that of all."""

Order = dict[str, Any]
"""Plain values."""


def send(peers: Peers, order: Order, tensors: Sequence[Tensor] = ()) -> None:
    """Send an order to all others."""
    data = packed(order, tensors)
    peers.order(data[:FIRST])
    if len(data) > FIRST:
        peers.order(data[FIRST:])


def receive(peers: Peers) -> tuple[Order, list[Tensor]]:
    """The leader's next order."""
    data = peers.receive(FIRST)
    size = int.from_bytes(data[8:_HEAD].numpy().tobytes(), "little")
    if size > FIRST:
        data = torch.cat([data, peers.receive(size - FIRST)])
    return unpacked(data)


def packed(order: Order, tensors: Sequence[Tensor] = ()) -> Tensor:
    """[at least FIRST] uint8."""
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([order, kinds], separators=(",", ":")).encode()
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    size = _HEAD + len(text) + sum(map(len, parts))
    data = torch.empty(max(size, FIRST), dtype=torch.uint8)
    head = len(text).to_bytes(8, "little") + size.to_bytes(8, "little") + text
    data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    at = len(head)
    for part in parts:
        data[at : at + len(part)] = part
        at += len(part)
    return data


def unpacked(data: Tensor) -> tuple[Order, list[Tensor]]:
    """What was packed."""
    whole = memoryview(data.numpy())  # type: ignore[arg-type]
    at = _HEAD + int.from_bytes(whole[:8], "little")
    order, kinds = json.loads(bytes(whole[_HEAD:at]))
    tensors = []
    for name, shape in kinds:
        dtype: torch.dtype = getattr(torch, name)
        size = dtype.itemsize
        for width in shape:
            size *= width
        tensors.append(data[at : at + size].clone().view(dtype).view(shape))
        at += size
    return order, tensors
