"""What a model or a block returns: a tensor, or tensors in tuples, mappings, dataclasses, one inside the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from quark.errors import DataError


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of numbers in ``output``, in their order; complex ones as pairs of real numbers.

    Whole numbers are left out: a class or an index follows from other values and says nothing of how close they are.
    What is no container, such as a cache of keys and values, holds no answer.
    """
    if isinstance(output, torch.Tensor):
        real = torch.view_as_real(output) if output.is_complex() else output
        return [real] if real.is_floating_point() else []
    return [tensor for part in parts_of(output) for tensor in tensors_of(part)]


def parts_of(output: Any) -> Iterable[Any]:
    """What a container holds."""
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, tuple | list):
        return output
    return vars(output).values() if is_dataclass(output) or hasattr(output, "logits") else ()


def answer(output: Any) -> torch.Tensor:
    """The tensor that stands for ``output``: the first of ``answer_tensors``.

    Raises:
        DataError: there is none.
    """
    return answer_tensors(output)[0]


#: What answers beside logits are not called.
INNER = ("hidden_state", "attention", "router", "past_key", "loss")


def answer_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors that ``output`` is judged by: its ``logits`` and what else is no inner state; all where it has none.

    Raises:
        DataError: there is none.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if named is not None:
        fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        others = [one for name, one in fields.items() if name != "logits" and not any(word in name for word in INNER)]
    found = tensors_of(output if named is None else [named, *others])
    if not found:
        raise DataError(
            f"the model returns {type(output).__name__} without a tensor of floating-point numbers, so its answers "
            f"cannot be compared; wrap it so that it returns tensors, alone or in tuples, lists, dicts or dataclasses"
        )
    return found
