"""Algorithms of users, for both flows: one function on arrays that rounds the weight of a linear layer.

What both flows do around it is theirs: they sum what the layers read, give the function the grid of a weight, put what
it returns on that grid, and keep it where it loses less on the calibration data than rounding to nearest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from quark.algorithms.columns import Columns
from quark.algorithms.names import ROWS, TAKEN, same
from quark.dataclass import dataclass
from quark.errors import ConfigError, is_of, users_code, words_of

Function = Callable[..., np.ndarray]
GIVEN = 3
"""Arguments that the flows give: the weight, what is known of its inputs, its grid."""
KINDS = (bool, int, float, str)
"""Types of settings."""


@dataclass(frozen=True)
class OwnAlgorithm:
    """An algorithm that somebody registered.

    Attributes:
        name: what configurations call it.
        function: (weight, hessian, grid, **settings) -> values.
        settings: name -> default.
    """

    name: str
    function: Function
    settings: Mapping[str, Any]

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuse settings that are of another type than their defaults.

        Raises:
            ConfigError: the first one, its value and what it may be.
        """
        for name, default in self.settings.items():
            if not is_of(values[name], type(default)):
                raise ConfigError(f"{self.name}: {name}={values[name]!r:.80} must be {words_of(type(default))}")

    def rounded(self, weight: np.ndarray, hessian: np.ndarray, grid: Columns, values: Mapping[str, Any]) -> np.ndarray:
        """The weight [out, in] on its grid, float32.

        Raises:
            ConfigError: the function raises something, or returns another shape, or values that are not finite.
        """
        with users_code(f"the algorithm {self.name!r}"):
            found = np.asarray(self.function(weight.copy(), hessian.copy(), grid, **values))
        if found.shape != weight.shape or found.dtype.kind != "f":
            raise ConfigError(
                f"the algorithm {self.name!r} must return floats of the shape {weight.shape}, not {found.dtype} of "
                f"{found.shape}"
            )
        if not np.isfinite(found).all():
            raise ConfigError(f"the algorithm {self.name!r} returned values that are not finite")
        return np.asarray(grid.round(found.astype(np.float32)), np.float32)


OWN: dict[str, OwnAlgorithm] = {}
"""By name, those that are registered."""


def own_algorithm(name: str, function: Function, others: Iterable[str] = ()) -> OwnAlgorithm:
    """The row of a function.

    Args:
        name, function: as of ``OwnAlgorithm``.
        others: names that are taken beside those of this package and of ``OWN``.

    Raises:
        ConfigError: a name that is taken or no identifier, no function, or one whose settings have no defaults of a
            plain type.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"the name of an algorithm must be an identifier, not {name!r}")
    if same(name) in TAKEN | {same(other) for other in (*OWN, *others)}:
        raise ConfigError(f"the algorithm {name!r} exists already: choose another name")
    if not callable(function):
        raise ConfigError(f"the algorithm {name!r} must be a function, not {function!r}")
    signature = _signature(name, function)
    rest = list(signature.parameters.values())[GIVEN:]
    settings = {one.name: one.default for one in rest if one.kind is not one.VAR_KEYWORD}
    for setting, default in settings.items():
        if type(default) not in KINDS or setting in ("name", "layers", "keep_worse"):
            raise ConfigError(
                f"the algorithm {name!r}: the setting {setting!r} needs a default that is a number, a text or a bool, "
                "and a name other than name, layers, keep_worse"
            )
    try:
        signature.bind(*range(GIVEN))
    except TypeError as error:
        raise ConfigError(f"the algorithm {name!r} must take (weight, hessian, grid): {error}") from error
    return OwnAlgorithm(name, function, settings)


def _signature(name: str, function: Function) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"the algorithm {name!r} must be a function of Python, not {function!r}") from error


def chooses_codes(name: str) -> bool:
    """Whether an algorithm of the torch flow chooses codes under given steps, as all that are registered do."""
    return name in OWN or any(row.codes for row in ROWS if row.torch == name)
