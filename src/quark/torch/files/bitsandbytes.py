"""Weights that bitsandbytes has quantized: 4 bits through a table, or int8 per row.

4 bits   weight [n / 2, 1] bytes, the first code of a byte in its high half; weight.quant_map, the values of the 16
         codes; weight.absmax, a scale for each run of ``blocksize`` values; weight.quant_state.*, JSON in bytes
         (shape, blocksize). Scales may be quantized themselves: codes of 8 bits in absmax, weight.nested_quant_map,
         weight.nested_absmax, and nested_offset in the JSON.
int8     weight [out, in], SCB [out]: weight * SCB / 127
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quark.errors import ModelError
from quark.reading import parse_json
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.decoded import Parts
from quark.torch.files.coded import Coded, Found, Tensors

STATE = ".weight.quant_state.bitsandbytes__"
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def bitsandbytes(tensors: Tensors, described: Mapping[str, Any], checkpoint: Checkpoint) -> Found:
    """The weights of a folder that bitsandbytes has quantized.

    Raises:
        ModelError: the description of a weight that cannot be read.
    """
    found = {}
    for name in tensors:
        weight = f"{name.removesuffix('.SCB')}.weight"
        if name.endswith(".SCB") and weight in tensors:
            parts = {"weight": weight, "SCB": name, **beside(tensors, name.removesuffix("SCB"), ("weight_format",))}
            found[weight] = Coded(tensors[weight].shape, parts, rows_values)
        elif STATE in name:
            weight = name.partition(STATE)[0] + ".weight"
            state = state_of(tensors, name, checkpoint)
            parts = {"weight": weight, "quant_state": name, **beside(tensors, f"{weight}.", BESIDE)}
            found[weight] = Coded(tuple(state["shape"]), parts, decoder_of(state))
    return found


def beside(tensors: Tensors, prefix: str, ends: tuple[str, ...]) -> dict[str, str]:
    """The tensors that are there, by their ends."""
    return {end: f"{prefix}{end}" for end in ends if f"{prefix}{end}" in tensors}


def state_of(tensors: Tensors, name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """What is said about a weight of 4 bits."""
    text = bytes(tensors[name].read(checkpoint.folder).to(torch.uint8).tolist()).decode("utf-8", "replace")
    state = parse_json(text, f"the tensor {name!r}", ModelError)
    sizes = [*state.get("shape", ()), state.get("blocksize")] if isinstance(state, dict) else [None]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{name!r} must say the shape and the blocksize of a weight, and holds {text!r:.99}")
    made: dict[str, Any] = state
    return made


def decoder_of(state: Mapping[str, Any]) -> Callable[[Parts], torch.Tensor]:
    """Values of the table times the scales of their runs."""

    def decode(parts: Parts) -> torch.Tensor:
        packed, scale, size = parts["weight"].reshape(-1).view(torch.uint8), parts["absmax"], int(state["blocksize"])
        if scale.numel() != -(-2 * packed.numel() // size) or (scale.dtype == torch.uint8) != (
            "nested_absmax" in parts
        ):
            raise ValueError(
                f"{scale.numel()} scales of {scale.dtype} for {2 * packed.numel()} codes in blocks of {size}"
            )
        codes = torch.stack((packed >> 4, packed & 15), 1).reshape(-1).long()
        if "nested_absmax" in parts:
            size_above = min(int(state["nested_blocksize"]), scale.numel())
            steps = parts["nested_absmax"].float().repeat_interleave(size_above)
            scale = parts["nested_quant_map"].float()[scale.long()] * steps[: scale.numel()]
            scale = scale + float(state["nested_offset"])
        steps = scale.float().repeat_interleave(min(size, codes.numel()))[: codes.numel()]
        return parts["quant_map"].float()[codes] * steps

    return decode


def rows_values(parts: Parts) -> torch.Tensor:
    """int8 under the largest magnitude of each row."""
    weight, largest = parts["weight"].view(torch.int8), parts["SCB"]
    if largest.shape != weight.shape[:1]:
        raise ValueError(f"{list(largest.shape)} scales for {weight.shape[0]} rows")
    return weight.float() * (largest.float() / 127)[:, None]
