"""Online rotations: a linear layer whose input is turned by an orthogonal matrix before anything else sees it.

    y = Q_in(x R) Q_w(W R)^T        computes x W^T, since R R^T = 1

The turn is a hook of the layer, so that it stays with it when the layer is quantized, copied or pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quark.algorithms.hadamard import Rotation
from quark.errors import ModelError
from quark.torch.corrected import ErrorCorrected

SLOT = "input_rotation"


class Turn:
    """The hook: turns the first input."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the first one turned."""
        return (self.rotation.apply(args[0]), *args[1:])


def attach_rotation(layer: nn.Module, rotation: Rotation) -> None:
    """Turn the inputs of ``layer`` from now on; its weight is not changed."""
    layer.__dict__[SLOT] = rotation
    layer.__dict__[f"_{SLOT}_handle"] = layer.register_forward_pre_hook(Turn(rotation))


def detach_rotation(layer: nn.Module) -> None:
    """Undo ``attach_rotation``."""
    layer.__dict__.pop(SLOT, None)
    handle = layer.__dict__.pop(f"_{SLOT}_handle", None)
    if handle is not None:
        handle.remove()


def online_rotations(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rotation]]:
    """(name, layer, rotation) of the layers whose inputs are turned."""
    for name, module in model.named_modules():
        if SLOT in module.__dict__:
            yield name, module, module.__dict__[SLOT]


def refuse_to_export(model: nn.Module) -> None:
    """Raise for layers that no format holds yet: their files would be read back as another model.

    Raises:
        ModelError: inputs that are turned online, or branches of low rank.
    """
    turned = [name for name, _, _ in online_rotations(model)]
    wrapped = [name for name, module in model.named_modules() if isinstance(module, ErrorCorrected)]
    for names, algorithm in ((turned, "online rotations (r4, online_r1_rotation)"), (wrapped, "svdquant")):
        if names:
            raise ModelError(
                f"no export holds {algorithm} yet; {names[0]!r} and {len(names) - 1} more layers have them"
            )


def matrix_of(rotation: Rotation) -> torch.Tensor:
    """The matrix R, float64."""
    return torch.from_numpy(rotation.matrix())
