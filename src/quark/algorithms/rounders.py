"""The algorithms that round the columns of linear layers: a row each, for both flows.

What the inputs of a layer say is prepared once for all layers that read them, then weight by weight is rounded. The
settings are the fields of the configuration, which both dialects call alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quark.algorithms.columns import Columns
from quark.algorithms.gptaq import asymmetric_feedback
from quark.algorithms.gptq import feedback_of, round_columns
from quark.algorithms.own import OwnAlgorithm
from quark.algorithms.qronos import qronos
from quark.dataclass import dataclass
from quark.numerics.array import Array, Same, as_parameter, is_torch


class Inputs(Protocol):
    """Sums or means over what layers read, [columns, columns].

    Attributes:
        hessian: of x~ x~^T, x~ the inputs of the quantized model.
        cross: of x x~^T, x those of the float model; None: they are the same.
    """

    @property
    def hessian(self) -> Same: ...  # noqa: D102

    @property
    def cross(self) -> Same | None: ...  # noqa: D102


#: (weight [out, in], its grid) -> values on the grid.
Rounding = Callable[[Array, Columns], Same]


@dataclass(frozen=True)
class Rounder:
    """An algorithm.

    Attributes:
        prepare: (inputs, configuration) -> how weights that read them are rounded.
        paired: it needs what the layers read in the float model.
    """

    prepare: Callable[[Inputs, Any], Rounding]
    paired: bool = False


def _gptq(inputs: Inputs, config: Any) -> Rounding:
    feedback = feedback_of(inputs.hessian, config.damp_percent, config.desc_act)
    return lambda weight, grid: round_columns(weight, feedback, grid, config.block_size)


def _gptaq(inputs: Inputs, config: Any) -> Rounding:
    damping, order = config.damp_percent, config.desc_act
    feedback, drift = asymmetric_feedback(inputs.hessian, _cross(inputs), config.alpha, damping, order)
    return lambda weight, grid: round_columns(weight, feedback, grid, config.block_size, drift)


def _qronos(inputs: Inputs, config: Any) -> Rounding:
    sums, settings = (inputs.hessian, _cross(inputs)), (config.block_size, config.alpha, config.desc_act)
    return lambda weight, grid: qronos(weight, sums, grid, *settings)


def _cross(inputs: Inputs) -> Same:
    return inputs.hessian if inputs.cross is None else inputs.cross


def _own(inputs: Inputs, config: Any) -> Rounding:
    """By the function of a user, which gets NumPy arrays."""
    own: OwnAlgorithm = config.own
    hessian, settings = _array(inputs.hessian), {name: getattr(config, name) for name in own.settings}
    return lambda weight, grid: as_parameter(own.rounded(_array(weight), hessian, grid.map(_array), settings), weight)


def _array(x: Array) -> np.ndarray:
    """NumPy's, whatever device the values are on."""
    return x.detach().cpu().numpy() if is_torch(x) else np.asarray(x)


ROUNDERS = {"gptq": Rounder(_gptq), "gptaq": Rounder(_gptaq, paired=True), "qronos": Rounder(_qronos, paired=True)}
"""By the name that both dialects have for an algorithm."""


def rounder_of(config: Any) -> Rounder:
    """The row of a configuration of either dialect, or of a registered algorithm."""
    return Rounder(_own) if config.own is not None else ROUNDERS[config.name]
