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
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.torch.config.algo_base import AlgoConfig
from quark.torch.config.algorithms import RotationConfig, SVDQuantConfig
from quark.torch.config.model import QConfig
from quark.torch.corrected import ErrorCorrected
from quark.torch.first_input import Arguments, first_input, with_input
from quark.torch.kv_cache import cache_quantizers

SLOT = "input_rotation"
ONLINE, KEYS = "online rotations (r4, online_r1_rotation)", "rotated keys (r3)"
BRANCHES = "branches of low rank (svdquant)"


@dataclass(frozen=True)
class Dense:
    """An orthogonal matrix that no construction gives (one of a file).

    Attributes:
        values: [size, size], float64.
    """

    values: torch.Tensor

    @property
    def size(self) -> int:
        """Of the vectors that are turned."""
        return len(self.values)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [.., size] times the matrix."""
        return x @ self.values.to(x.device, x.dtype)


class Turn:
    """The hook, which gets keywords: turns the first input."""

    def __init__(self, rotation: Rotation | Dense) -> None:
        self.rotation = rotation

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments with the first one turned."""
        return with_input(module, args, kwargs, self.rotation.apply(first_input(module, args, kwargs)))


def attach_rotation(layer: nn.Module, rotation: Rotation | Dense) -> None:
    """Turn the inputs of ``layer`` from now on; its weight is not changed."""
    layer.__dict__[SLOT] = rotation
    layer.__dict__[f"_{SLOT}_handle"] = layer.register_forward_pre_hook(Turn(rotation), with_kwargs=True)


def detach_rotation(layer: nn.Module) -> None:
    """Undo ``attach_rotation``."""
    layer.__dict__.pop(SLOT, None)
    handle = layer.__dict__.pop(f"_{SLOT}_handle", None)
    if handle is not None:
        handle.remove()


def online_rotations(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rotation | Dense]]:
    """(name, layer, rotation) of the layers whose inputs are turned."""
    for name, module in model.named_modules():
        if SLOT in module.__dict__:
            yield name, module, module.__dict__[SLOT]


def refuse_to_export(model: nn.Module) -> None:
    """Raise for layers that only our own format holds: other files would be read back as another model.

    Raises:
        ModelError: inputs or keys that are turned online, or branches of low rank.
    """
    keys = [name for name, cache in cache_quantizers(model) if cache.turned]
    turned = [name for name, _, _ in online_rotations(model)]
    wrapped = [name for name, module in model.named_modules() if isinstance(module, ErrorCorrected)]
    for names, algorithm in ((turned, ONLINE), (keys, KEYS), (wrapped, BRANCHES)):
        if names:
            raise ModelError(
                f"this format does not hold {algorithm}; {names[0]!r} and {len(names) - 1} more layers have them. "
                f"export_safetensors(custom_mode='quark') does"
            )


def refuse_algorithms(config: QConfig, holder: str) -> None:
    """Raise, before any work, for algorithms that leave in a model what only our own format and loader hold.

    Args:
        config: of the model.
        holder: the format or program that has no place for it.

    Raises:
        ConfigError: the algorithm is named.
    """
    for algorithm in config.algo_config or []:
        left = left_by(algorithm)
        if left:
            raise ConfigError(
                f"{holder} does not hold {left}, which the algorithm {algorithm.name!r} leaves; --format quark "
                "does, for quark.torch.import_model_from_safetensors"
            )


def left_by(algorithm: AlgoConfig) -> str:
    """What an algorithm leaves beside layers or inside attention, in words; nothing: values of tensors alone."""
    if isinstance(algorithm, SVDQuantConfig):
        return BRANCHES
    if not isinstance(algorithm, RotationConfig):
        return ""
    online = algorithm.r4 or (algorithm.r1 and algorithm.online_r1_rotation)
    return ONLINE if online else KEYS if algorithm.r3 else ""


def matrix_of(rotation: Rotation | Dense) -> torch.Tensor:
    """The matrix R, float64."""
    if isinstance(rotation, Dense):
        return rotation.values
    return torch.from_numpy(rotation.matrix())
