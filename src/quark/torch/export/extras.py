"""What algorithms add to a layer beside its own tensors, in files and back.

    X.input_rotation          [features, features]: inputs of X are turned by it first; int8 (±1 and 0, to be divided by
                              the root of the entries per row that are not 0) or float64 (as it is)
    X.layer.*, X.smooth, X.correction.l1.weight, X.correction.l2.weight     the branch of low rank beside X (SVDQuant)

A model to be loaded gets the modules and places for these tensors from their names in the file (``prepare``), and the
rotations from their values (``settle``). A rotation that one of our constructions makes is applied as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from quark.algorithms.hadamard import Rotation, rotation
from quark.errors import ModelError, QuarkError
from quark.torch.corrected import ErrorCorrected
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.original import names_of
from quark.torch.export.shards import Item
from quark.torch.rotated import Dense, attach_rotation, matrix_of, online_rotations

ROTATION = ".input_rotation"
BRANCH = ".correction.l1.weight"
ALIGNMENT = 64  # bytes, of memory that torch makes on a CPU


def extra_items(model: nn.Module) -> Iterator[Item]:
    """The rotations of a model; branches are tensors of its state anyway."""
    yield from (turn_item(name, turn) for name, _, turn in online_rotations(model))


def turn_item(name: str, turn: Rotation | Dense) -> Item:
    """The rotation of the inputs of a layer."""
    key = f"{name}{ROTATION}"
    kind = torch.float64 if signs_of(turn) is None else torch.int8
    return Item({key: ((turn.size, turn.size), kind)}, lambda: {key: stored(turn)})


def stored(turn: Rotation | Dense) -> torch.Tensor:
    """A rotation as files hold it."""
    signs = signs_of(turn)
    return matrix_of(turn) if signs is None else signs


def signs_of(turn: Rotation | Dense) -> torch.Tensor | None:
    """A matrix whose entries have one magnitude, or are 0, as int8; None for others."""
    matrix = matrix_of(turn)
    size = float(matrix.abs().max())
    signs = (matrix / size).round()
    return signs.to(torch.int8) if torch.allclose(signs * size, matrix, atol=1e-9, rtol=0) else None


def has_extras(checkpoint: Checkpoint) -> bool:
    """Whether a file holds what is listed above."""
    return any(name.endswith((ROTATION, BRANCH)) for name in checkpoint.names)


def prepare(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Modules and places for the extras of a checkpoint; layers are quantized already.

    Raises:
        ModelError: extras of a layer that the model does not have.
    """
    inside = {outside: name for name, outside in names_of(model).layers.items()}
    for name in checkpoint.names:
        if name.endswith(BRANCH):
            wrap(model, checkpoint, name.removesuffix(BRANCH), inside)
    for name in checkpoint.names:
        if name.endswith(ROTATION):
            layer = layer_called(model, name.removesuffix(ROTATION), checkpoint, inside)
            layer.register_buffer(ROTATION[1:], torch.empty_like(checkpoint.read(name)))


def layer_called(model: nn.Module, name: str, checkpoint: Checkpoint, inside: Mapping[str, str]) -> nn.Module:
    """A layer by its name in a file; ``inside``: names in memory by those in files."""
    try:
        return model.get_submodule(inside.get(name, name))
    except AttributeError as error:
        raise ModelError(
            f"{str(checkpoint.folder)!r} holds a part of {name!r}, which the model does not have"
        ) from error


def wrap(model: nn.Module, checkpoint: Checkpoint, name: str, inside: Mapping[str, str]) -> None:
    """Put a branch beside a layer."""
    layer = layer_called(model, name, checkpoint, inside)
    down, up, smooth = (checkpoint.read(f"{name}.{part}") for part in
                        ("correction.l1.weight", "correction.l2.weight", "smooth"))  # fmt: skip
    module = ErrorCorrected(layer, down, up, smooth, down.dtype)
    module.train(layer.training)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is layer and parent is not module:
                parent._modules[key] = module


def settle(model: nn.Module) -> None:
    """Turn the loaded matrices into rotations, and move what is mapped from a file to where kernels read it alike."""
    align(model)
    for module in list(model.modules()):
        if ROTATION[1:] in module._buffers:
            matrix = module._buffers.pop(ROTATION[1:])
            if matrix is not None:
                attach_rotation(module, rotation_of(matrix))


def align(model: nn.Module) -> None:
    """Give floating-point tensors memory that begins where torch lets it begin.

    Tensors mapped from a file begin anywhere, and matrix products on a CPU add in another order there: by a last bit,
    out of which codes that are made behind them (4 bits of activations) make a hundredth of the answer.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def rotation_of(matrix: torch.Tensor) -> Rotation | Dense:
    """The rotation that a file holds."""
    if matrix.is_floating_point():
        return known(matrix.double().cpu()) or Dense(matrix.double())
    count = int((matrix[0] != 0).sum())
    whole = matrix.double().cpu() / np.sqrt(count)
    return known(whole, count) or Dense(whole.to(matrix.device))


def known(matrix: torch.Tensor, block: int | None = None) -> Rotation | None:
    """The construction that gives ``matrix``, if one does."""
    for size in (None, block):
        try:
            found = rotation(len(matrix), size)
        except QuarkError:
            continue
        if torch.allclose(matrix_of(found), matrix, atol=1e-6):
            return found
    return None
