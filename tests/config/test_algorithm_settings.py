"""Every setting of every algorithm, in both dialects: what is of another type or out of bounds is refused by name."""

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from quark.config.algorithm import types_of
from quark.errors import ConfigError
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS
from quark.torch.config.algorithms import AlgoConfig

CLASSES = [*ALGO_NAME_TO_CLASS.values(), *(AlgoConfig.registry[name] for name in sorted(AlgoConfig.registry))]
WRONG: dict[type, tuple[Any, ...]] = {
    int: (1.5, True, "1", None),
    float: (float("nan"), float("inf"), True, "1", None),
    bool: (1, "yes", None),
}
CASES = [(kind, name) for kind in CLASSES for name, hint in types_of(kind).items() if hint in WRONG]
BOUNDED = [(kind, name) for kind in CLASSES for name in kind.BOUNDS]
EXTREMES = (-7, -0.25, 0, 0.5, 1.5, 2**40, (), (3.0,), (-1.0, 2.0), "nothing", False)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_another_type_is_refused_by_name(kind: Any, name: str) -> None:
    for value in WRONG[types_of(kind)[name]]:
        with pytest.raises(ConfigError, match=rf"{kind.__name__}: {name}=.* must be "):
            kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), BOUNDED)
def test_a_bound_refuses_something(kind: Any, name: str) -> None:
    said = []
    for value in EXTREMES:
        try:
            kind(**{name: value})
        except ConfigError as error:
            said.append(str(error))
    assert said and all(f"{kind.__name__}: {name}=" in one for one in said[:1]), said


@pytest.mark.parametrize("kind", CLASSES)
def test_numbers_of_numpy_are_written_as_those_of_python(kind: Any) -> None:
    defaults = {one.name: one.default for one in fields(kind)}
    given = {
        name: np.int64(defaults[name]) if hint is int else np.float64(defaults[name])
        for name, hint in types_of(kind).items()
        if hint in (int, float)
    }
    made = kind(**given)
    assert json.loads(json.dumps(made.to_dict(), default=lambda value: None)) is not None
    assert not any(isinstance(value, np.generic) for value in made.to_dict().values())
    assert made.to_dict() == kind().to_dict()
