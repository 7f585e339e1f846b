"""What is trained and on what: settings, a layer, its data in batches, and when it is enough (``training.py``: how).

torch is imported when a layer is trained, not before; tensors live on the device that the settings name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError

Tensor = Any  # torch.Tensor: torch is not imported here
#: (input, weight, bias or None) -> output of the layer and the activation function behind it.
Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Settings:
    """How long, how fast and on what a layer is trained.

    Attributes:
        iterations: steps of Adam.
        batch_size: samples per step.
        learning_rate: of Adam.
        lr_adjust: (error, rate): the rate where the error before training is above.
        early_stop: AdaQuant stops when the mean error of a stretch of steps is no smaller than that of the best one
            before, AdaRound when every rounding is decided.
        stretch: steps in such a stretch; 0: a tenth of all.
        drop_ratio: share of batches that take the quantized model's input; the others take the float model's.
        update_bias: train the bias as well.
        shrinkage: pull weights to their float values as far as the samples leave them open.
        seed: of the order of the samples.
        device: of torch.
        pin_memory: hold the samples where a GPU can fetch them by itself.
        log_period: steps between two lines of the log; 0: none.
        reg_param, beta_range, warm_start: of AdaRound.
    """

    iterations: int = 1000
    batch_size: int = 1
    learning_rate: float = 0.1
    lr_adjust: tuple[float, float] | None = None
    early_stop: bool = False
    stretch: int = 0
    drop_ratio: float = 1.0
    update_bias: bool = False
    shrinkage: bool = True
    seed: int = 1705472343
    device: str = "cpu"
    pin_memory: bool = False
    log_period: int = 0
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20.0, 2.0)
    warm_start: float = 0.2


def settings_of(config: Any, own: Mapping[str, Any]) -> Settings:
    """The part of a configuration that concerns the training of one layer, for both flows.

    Args:
        config: of either dialect; most of its fields are called as here.
        own: settings that the flow says itself.
    """
    alike = {one.name: getattr(config, one.name) for one in fields(Settings) if hasattr(config, one.name)}
    return Settings(**{"iterations": config.num_iterations, "seed": config.fixed_seed, **alike, **own})


@dataclass(frozen=True)
class Data:
    """One layer's samples: what the quantized and the float model feed it, and what the float model makes of it."""

    inputs: Sequence[np.ndarray]
    float_inputs: Sequence[np.ndarray]
    targets: Sequence[np.ndarray]


@dataclass(frozen=True)
class TrainedLayer:
    """What is trained.

    Attributes:
        name: for messages.
        forward: the layer and its activation function.
        weight: float values.
        bias: float values, or ``None``.
        channel_axis: axis of the output along which the norm runs.
        linear: the layer alone, where it is linear in its weight.
    """

    name: str
    forward: Forward
    weight: np.ndarray
    bias: np.ndarray | None = None
    channel_axis: int = 1
    linear: Forward | None = None


@dataclass(frozen=True)
class Trained:
    """What came out: arrays, and the error over all samples before (rounded to nearest) and after.

    ``kept`` is false where training made it worse; the arrays are then what they were.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    before: float
    after: float
    steps: int
    kept: bool = True


def import_torch(algorithm: str) -> Any:
    """The torch module.

    Raises:
        ConfigError: it is not installed; the message names the extra that brings it.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"{algorithm} needs the package torch: pip install torch") from error
    return torch


def check_device(torch: Any, device: str) -> Any:
    """The device of that name.

    Raises:
        ConfigError: torch has no such device.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"optim_device: torch has no device {device!r} here ({error})") from error
    return found


class Batches:
    """Samples on the device, in a fresh random order every time all have been seen.

    Samples of equal shape are joined along their first axis; others come one at a time.
    """

    def __init__(self, torch: Any, data: Data, settings: Settings) -> None:
        self._torch, self._data, self._settings = torch, data, settings
        self._random = np.random.default_rng(settings.seed)
        self._device = torch.device(settings.device)
        shapes = {(array.shape, target.shape) for array, target in zip(data.inputs, data.targets, strict=True)}
        self._size = min(settings.batch_size, len(data.inputs)) if len(shapes) == 1 and next(iter(shapes))[0] else 1

    def random(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input, target) of one batch after the other, without end."""
        while True:
            order = self._random.permutation(len(self._data.inputs))
            for start in range(0, len(order) - self._size + 1, self._size):
                dropped = self._settings.drop_ratio < 1 and self._random.random() >= self._settings.drop_ratio
                source = self._data.float_inputs if dropped else self._data.inputs
                chosen = order[start : start + self._size]
                yield self._joined(source, chosen), self._joined(self._data.targets, chosen)

    def all(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input, target) of every sample."""
        for inputs, targets in zip(self._data.inputs, self._data.targets, strict=True):
            yield self._moved(inputs), self._moved(targets)

    def _joined(self, arrays: Sequence[np.ndarray], chosen: np.ndarray) -> Tensor:
        if len(chosen) == 1:
            return self._moved(arrays[chosen[0]])
        return self._moved(np.concatenate([arrays[index] for index in chosen]))

    def _moved(self, array: np.ndarray) -> Tensor:
        tensor = as_tensor(self._torch, array)
        if self._settings.pin_memory and self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)


def as_tensor(torch: Any, array: np.ndarray) -> Tensor:
    """A float32 tensor that shares the array where it can (files are read, not written, so a copy is made of those)."""
    values = np.ascontiguousarray(array, np.float32)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


class Stopper:
    """Says when to stop: the mean error of a stretch is no smaller than the best before it."""

    def __init__(self, settings: Settings) -> None:
        self._on, self._stretch = settings.early_stop, settings.stretch or max(1, settings.iterations // 10)
        self._best, self._sum, self._count = float("inf"), 0.0, 0

    def ends(self, loss: Tensor) -> bool:
        """Whether training ends after a step with this error."""
        if not self._on:
            return False
        self._sum, self._count = self._sum + float(loss), self._count + 1
        if self._count < self._stretch:
            return False
        mean, best = self._sum / self._count, self._best
        self._best, self._sum, self._count = min(best, mean), 0.0, 0
        return mean >= best
