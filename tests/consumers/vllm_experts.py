"""Experts as vLLM has loaded them, decoded from its own parameters and compared one by one with what was evaluated.

    w13_weight, w13_weight_packed [experts, 2 * inner, in]    gate above up        w2_weight [experts, out, inner]
    ..._weight_scale        one each (of w13 two), one a row, or one a block of 16 (FP8) or 32 (powers of two)
    ..._weight_zero_point   of int4, two rows a byte
    ..._weight_scale_2      NVFP4's scale of the tensor (quark); ..._weight_global_scale divides (compressed-tensors)

Layouts without a rule here (compressed-tensors' int4 before vLLM has decoded it, FP6) are told by their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

EXPERT = re.compile(r"^(.*experts)\.(\d+)\.(\w+)$")
ROLES = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
ROLES_IN_ORDER = ("gate", "up", "down")
IN_TURN = "swigluoai"  # vLLM's activation of rows that take turns
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # of stacks that stay float
LIMIT, LIMIT_OF_INPUTS = 1e-3, 5e-3  # the latter: what bfloat16 leaves, as in vllm_table.py
FP8_MAX = 448.0


def compare(model: Any, expected: dict[str, Any]) -> tuple[int, int]:
    """How many projections of experts were compared, and how many have a layout without a rule.

    Args:
        model: of vLLM, with its weights loaded.
        expected: as ``vllm_judge.py`` reads it.

    Raises:
        ValueError: experts in another number, or with another value; the first is named.
    """
    wanted: dict[str, dict[tuple[int, str], Any]] = {}
    for name, values in expected.items():
        if (hit := EXPERT.match(name)) and hit[3] in ROLES:
            wanted.setdefault(hit[1], {})[int(hit[2]), ROLES[hit[3]]] = values
    stacks = ((name, layer, weight_of(layer, "w13")) for name, layer in model.named_modules())
    layers = {name: layer for name, layer, codes in stacks if codes is not None and codes.dtype not in FLOATS}
    if wanted and len(wanted) != len(layers):
        raise ValueError(f"{len(wanted)} layers have quantized experts, and vLLM has made {len(layers)}")
    compared = left = 0
    for ours, theirs in zip(sorted(wanted, key=natural), sorted(layers, key=natural), strict=False):
        parts = dict(projections(layers[theirs]))
        scales = {role: input_scale(layers[theirs], role) for role in ROLES_IN_ORDER}
        for (number, role), (x, whole, plain) in wanted[ours].items():
            values, bias = parts.get(role) or (None, None)
            if values is None:
                left += 1
                continue
            own = values[number].to(x.dtype), None if bias is None else bias[number].to(x.dtype)
            pairs = [("", F.linear(x, *own), plain, LIMIT)]
            if (scale := scales[role]) is not None:
                codes = (x.float() / scale[number]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
                inputs = (codes.float() * scale[number]).to(x.dtype)
                pairs.append((" with its inputs", F.linear(inputs, *own), whole, LIMIT_OF_INPUTS))
            for what, found, known, limit in pairs:
                error = float((found.float() - known.float()).norm() / known.float().norm())
                if not error <= limit:
                    raise ValueError(f"{role} of expert {number} of {theirs!r}{what}: relative error {error:.3g}")
            compared += 1
    return compared, left


def natural(name: str) -> list[int]:
    """Sorts the names of layers by their numbers."""
    return [int(number) for number in re.findall(r"\d+", name)]


def weight_of(layer: Any, name: str) -> torch.Tensor | None:
    """The codes or values of one weight."""
    own = dict(layer.named_parameters(recurse=False))
    return own.get(f"{name}_weight", own.get(f"{name}_weight_packed"))


def projections(layer: Any) -> Iterator[tuple[str, tuple[torch.Tensor | None, torch.Tensor | None]]]:
    """(role, (values [experts, out, in] or None, biases [experts, out] or None)) of one layer."""
    own = dict(layer.named_parameters(recurse=False))
    for role in ROLES_IN_ORDER:
        name = "w2" if role == "down" else "w13"
        values, bias = decoded(layer, name), own.get(f"{name}_bias")
        yield role, tuple(half(layer, role, value) for value in (values, bias))


def input_scale(layer: Any, role: str) -> torch.Tensor | None:
    """The static scales of FP8 inputs, one for each expert."""
    name = "w2" if role == "down" else "w13"
    weight, block = weight_of(layer, name), getattr(layer, f"{name}_weight_scale", None)
    fp4 = weight.dtype is torch.uint8 and block is not None and block.dtype is torch.uint8  # type: ignore[union-attr]
    scale = getattr(layer, f"{name}_input_scale", None)
    known = fp4 or weight.dtype is torch.float8_e4m3fn  # type: ignore[union-attr]
    return scale.data.float() if known and isinstance(scale, torch.Tensor) and scale.dim() == 1 else None


def half(layer: Any, role: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """The rows of gate or up, which take turns where the activation of a layer reads them so (gpt_oss)."""
    if value is None or role == "down":
        return value
    turns = str(getattr(layer, "activation", "")).rpartition(".")[2].lower() == IN_TURN
    first = role == "gate"
    return value[:, 1 - first :: 2] if turns else value.chunk(2, 1)[1 - first]


def decoded(layer: Any, name: str) -> torch.Tensor | None:
    """Values [experts, out, in] in float32; None without a rule for the layout."""
    weight: Any = weight_of(layer, name)
    scale, whole = getattr(layer, f"{name}_weight_scale", None), 1.0
    if weight.dtype in (torch.bfloat16, torch.float32):
        return weight.data.float()
    if weight.dtype is torch.uint8 and scale is not None and weight.shape[-1] * 2 % scale.shape[-1] == 0:
        codes = nibbles(weight.data)
        if scale.dtype in (torch.bfloat16, torch.float16, torch.float32):  # int4; blocks of FP4 have FP8 or a byte
            return (codes - zero_points(layer, name, scale)) * scale.data.float().repeat_interleave(
                codes.shape[-1] // scale.shape[-1], -1
            )
        values = FP4[codes]
        if (two := getattr(layer, f"{name}_weight_scale_2", None)) is not None:
            whole = rows(two.data.float(), values)
        if (two := getattr(layer, f"{name}_weight_global_scale", None)) is not None:
            whole = 1 / rows(two.data.float(), values)
        blocks = (16, 32)
    elif weight.dtype in (torch.float8_e4m3fn, torch.int8):
        values, blocks = weight.data.float(), (32,)
    else:
        return None
    if scale is None:
        return None
    factor = scale.data.float() if scale.dtype is not torch.uint8 else 2.0 ** (scale.data.float() - 127)
    if factor.dim() == 3 and factor.shape[-1] > 1:
        size = values.shape[-1] // factor.shape[-1]  # scales first, as NVFP4 is defined: one rounding is another value
        return values * (factor * whole).repeat_interleave(size, -1) if size in blocks else None
    return values * rows(factor, values) * whole


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The two codes of each byte of the last axis, the low one first."""
    codes = words.long()
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def zero_points(layer: Any, name: str, scale: torch.Tensor) -> torch.Tensor | int:
    """Of int4, one a value; the middle of the codes without any."""
    method = getattr(layer, "quant_method", None)
    if getattr(method, "is_symmetric", True):
        return 8
    packed = getattr(layer, f"{name}_weight_zero_point").data
    points = nibbles(packed.transpose(1, 2)).transpose(1, 2)
    inputs = weight_of(layer, name).shape[-1] * 2  # type: ignore[union-attr]
    return points.repeat_interleave(inputs // scale.shape[-1], -1)


def rows(factor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scales of experts, of their halves or of their rows as [experts, rows or 1, 1]."""
    factor = factor.reshape(factor.shape[0], -1, 1)
    return factor.repeat_interleave(values.shape[1] // factor.shape[1], 1)
