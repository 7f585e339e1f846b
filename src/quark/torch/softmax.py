"""Quantized attention probabilities: ``softmax_quant_spec``.

    P = Q(softmax(K q / sqrt(d)))

Every ``softmax`` that an attention module calls is followed by a quantizer, while the module runs; other code is not
touched. A fused kernel has no probabilities to quantize, so attention must be eager:
``model.set_attn_implementation("eager")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from quark.errors import ModelError
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.kv_cache import argument_of
from quark.torch.stage import Stage

CHILD = "_softmax_quantizer"
SOFTMAX = (torch.softmax, nn.functional.softmax, torch.Tensor.softmax)
FUSED = nn.functional.scaled_dot_product_attention


class SoftmaxQuantizer(nn.Module):
    """The quantizer of the probabilities of one attention module."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__()
        self.probabilities = FakeQuantize(stage, name=f"attention probabilities of {name!r}")
        self.name = name
        self.modes: list[Following] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the attention module runs."""
        mode = Following(self)
        mode.__enter__()
        self.modes.append(mode)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After it ran, or raised."""
        if self.modes:
            self.modes.pop().__exit__(None, None, None)


class Following(TorchFunctionMode):
    """While it is on, what ``softmax`` returns is quantized."""

    def __init__(self, quantizer: SoftmaxQuantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is FUSED:
            raise ModelError(
                f"softmax_quant_spec: {self.quantizer.name!r} computes attention in one kernel, which has no "
                f"probabilities to quantize; use attn_implementation='eager'"
            )
        result = func(*args, **(kwargs or {}))
        return self.quantizer.probabilities(result) if func in SOFTMAX else result


def find_attention(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules of a model: innermost modules that are handed a cache.

    Raises:
        ModelError: there are none, or they use a fused kernel.
    """
    found = [(name, module) for name, module in model.named_modules() if argument_of(module)]
    inner = [(name, module) for name, module in found if not any(other.startswith(f"{name}.") for other, _ in found)]
    inner = [(name, module) for name, module in inner if name]
    if not inner:
        raise ModelError(f"softmax_quant_spec: {type(model).__name__} has no attention module that is handed a cache")
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", "eager")
    if kernel not in (None, "eager"):
        raise ModelError(
            f"softmax_quant_spec: the model uses the attention kernel {kernel!r}, which has no probabilities to "
            f"quantize; call model.set_attn_implementation('eager') first"
        )
    return inner


def attach_softmax(name: str, module: nn.Module, stage: Stage) -> tuple[RemovableHandle, ...]:
    """Quantize the probabilities of one attention module from now on."""
    quantizer = SoftmaxQuantizer(stage, name)
    quantizer.train(module.training)
    module._modules[CHILD] = quantizer
    before = module.register_forward_pre_hook(quantizer.enter)
    return before, module.register_forward_hook(quantizer.leave, always_call=True)


def detach_softmax(module: nn.Module, handles: tuple[RemovableHandle, ...]) -> None:
    """Undo ``attach_softmax``."""
    module._modules.pop(CHILD, None)
    for handle in handles:
        handle.remove()


def softmax_quantizers(model: nn.Module) -> Iterator[FakeQuantize]:
    """The quantizers of attention probabilities."""
    return (module.probabilities for module in model.modules() if isinstance(module, SoftmaxQuantizer))
