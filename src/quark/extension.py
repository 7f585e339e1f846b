"""``quark.register_algorithm``: an algorithm of your own, in both flows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from quark.algorithms.own import OWN, Function, own_algorithm
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS, config_of_own, from_dict


@dataclass(frozen=True)
class Registered:
    """A registered algorithm; its configurations for ``algo_config`` of both flows."""

    name: str

    def onnx(self, settings: Mapping[str, Any] | None = None) -> Any:
        """For ``quark.onnx.QConfig(algo_config=[...])``; ``settings``: those that differ from their defaults."""
        return from_dict({"name": self.name, **(settings or {})})

    def torch(self, settings: Mapping[str, Any] | None = None) -> Any:
        """For the ``QConfig(algo_config=[...])`` of ``quark.torch``; ``settings`` as of ``onnx``."""
        from quark.torch.config.algorithms import AlgoConfig

        return AlgoConfig.from_dict({"name": self.name, **(settings or {})})


def register_algorithm(name: str, round_weight: Function) -> Registered:
    """Add an algorithm that rounds weights of linear layers to both flows, under ``name``.

    Names of algorithms are also what ``LLMTemplate.get_config(algorithm=...)``, configuration files and candidates of a
    search take. A program that reads a configuration with this name registers the algorithm first.

    Args:
        name: an identifier that no algorithm of either flow has; case and underscores make no difference.
        round_weight: ``round_weight(weight, hessian, grid, **settings) -> values``, all NumPy: the weight [out, in] in
            float32, the second moments of its inputs [in, in] up to a factor, and its grid (``grid.round(x)``: the
            nearest values to a matrix of the weight's shape; ``grid.take(columns)``, ``grid.rows(rows)``: a part). The
            values are put on the grid. Keyword arguments with a default are the settings. A result that loses more on
            the calibration data than rounding to nearest is not used: in torch row by row, in ONNX for a layer.

    Returns:
        What makes the configurations: ``registered.onnx()``, ``registered.torch({"damp": 0.1})``.

    Raises:
        ConfigError: a name that is taken or no identifier, no function, or settings without plain defaults.
    """
    row = own_algorithm(name, round_weight, (*ALGO_NAME_TO_CLASS, *_names_in_torch()))
    OWN[name] = row
    ALGO_NAME_TO_CLASS[name] = config_of_own(row)
    _tell_torch()
    return Registered(name)


def unregister_algorithm(name: str) -> None:
    """Remove what ``register_algorithm`` added.

    Args:
        name: under which it was added.

    Raises:
        ConfigError: no such algorithm.
    """
    if name not in OWN:
        raise ConfigError(f"the algorithm {name!r} was not registered")
    del OWN[name], ALGO_NAME_TO_CLASS[name]
    if _TORCH in sys.modules:
        from quark.torch.config.algo_base import AlgoConfig

        AlgoConfig.registry.pop(name, None)


_TORCH = "quark.torch.config.algorithms"


def _names_in_torch() -> tuple[str, ...]:
    """The names that the torch flow has, as far as it is loaded: it looks for those of ``OWN`` when it loads."""
    if _TORCH not in sys.modules:
        return ()
    from quark.torch.config.algo_base import AlgoConfig

    return tuple(AlgoConfig.registry)


def _tell_torch() -> None:
    if _TORCH in sys.modules:
        from quark.torch.config.algorithms import take_own

        take_own()
