"""The arithmetic of llama.cpp on a CPU: before a product with a quantized weight it rounds the other factor.

To codes of 8 bits in blocks of 32 (``Q8_0``; float16 scales) or 256 numbers (``Q8_K``; scales by the number of largest
magnitude), or to float16 where the weight is. The width of Gemma 3n's
gates is that of a sample. GELU is that of tanh, whichever a network has, from a table of float16,
the two bounds of YaRN are whole numbers (``truncate``, which gpt-oss has not), and norms of Qwen2-VL have no epsilon. A
model that does the same answers as llama.cpp does, but for numbers that lie between two codes and fall the other way by
a last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Rounding = Callable[[torch.Tensor], torch.Tensor]


def q8_0(values: torch.Tensor) -> torch.Tensor:
    """Blocks of 32: the code 127 is the largest magnitude, and the scale becomes float16 after the codes are made."""
    blocks = values.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, blocks * (127 / largest), 0).round()
    return (codes * (largest / 127).half().float()).flatten(-2)


def q8_k(values: torch.Tensor) -> torch.Tensor:
    """Blocks of 256: the code -127 is the number of largest magnitude, the scale float32."""
    blocks = values.float().unflatten(-1, (-1, 256))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    codes = torch.where(largest != 0, blocks * (-127 / largest), 0).round().clamp(max=127)
    return (codes * (largest / -127)).flatten(-2)


def float16(values: torch.Tensor) -> torch.Tensor:
    """What float16 has of numbers."""
    return values.half().float()


ROUNDINGS: dict[str, Rounding] = {"F16": float16, "Q8_0": q8_0, "Q4_0": q8_0, "Q4_K": q8_k, "Q6_K": q8_k}


def compute_as_llama(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Round what linear layers read, by the GGML type of their weight (F32: not at all); the rest as said above."""
    for name, kind in kinds.items():
        if kind != "F32":
            model.get_submodule(name).register_forward_pre_hook(rounds(ROUNDINGS[kind]))
    for module in model.modules():
        if "Qwen2VLRMSNorm" in type(module).__name__ or "Qwen2_5_VLRMSNorm" in type(module).__name__:
            module.variance_epsilon = 0.0
        if "GELU" in type(module).__name__.upper():
            module.register_forward_hook(looked_up)
        if "Gemma3nTextMLP" in type(module).__name__ and module.activation_sparsity:
            module._gaussian_topk = above_most
        config: Any = copy.deepcopy(getattr(module, "config", None))
        if "RotaryEmbedding" in type(module).__name__ and not config.rope_parameters.get("truncate", True):
            config.rope_parameters["truncate"] = True
            module._buffers["inv_freq"] = type(module)(config)._buffers["inv_freq"]


def above_most(gates: torch.Tensor) -> torch.Tensor:
    """What exceeds 95 % of a normal distribution; its width is that of a sample."""
    return (gates - gates.mean(-1, keepdim=True) - 1.6448533 * gates.std(-1, keepdim=True)).relu()


def rounds(rounding: Rounding) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A hook."""
    return lambda _, inputs: (rounding(inputs[0]), *inputs[1:])


def looked_up(_: nn.Module, inputs: tuple[torch.Tensor, ...], __: torch.Tensor) -> torch.Tensor:
    """GELU from a table of float16; beyond 10 it is the number itself, or 0."""
    found = nn.functional.gelu(float16(inputs[0]), approximate="tanh")
    return torch.where(inputs[0].abs() < 10, float16(found), inputs[0].relu())
