"""What is taken as it is, is what pydantic would have made of it; so is every word of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter

from quark.cli import _commands
from quark.cli.sections import every
from quark.cli.words import TypedWords
from quark.config.nbits import NBits
from quark.config.options import Options
from quark.config.typed import Before, is_plainly
from quark.onnx.passes.registry import passes

TYPES = [
    *{repr(hint): hint for owner in (Options, NBits) for hint in owner.__annotations__.values()}.values(),
    *{repr(one.kind): one.kind for row in passes().values() for one in row.parameters.values()}.values(),
]
SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 100, 101, 2**70, 0.0, 1.0, 0.5, 99.9, 100.5, -1.0, math.nan, math.inf),
    *("", "a", "MinMax", "mse", "All", "1", "AES-256", b"a", Path("a"), object()),
]
VALUES = [
    *SCALARS,
    *([one] for one in SCALARS),
    *([[one, "b"]] for one in SCALARS),
    *({"k": one} for one in SCALARS),
    *({"k": [one]} for one in SCALARS),
    *([], {}, (), ("a", "b"), [("a", "b")], {1: "a"}, {"k": {"m": 1}}, [{"k": 1}], {"k": [{"m": [1]}]}),
]


@pytest.mark.parametrize("hint", TYPES, ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_plain_is_what_pydantic_makes_of_it(hint: Any, strict: bool) -> None:
    marks = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Before)]
    inner = hint.__args__[0] if marks and hasattr(hint, "__args__") else hint.__origin__ if marks else hint
    adapter: TypeAdapter[Any] = TypeAdapter(inner, config=ConfigDict(strict=True) if strict else None)
    plain = [value for value in VALUES if is_plainly(value, inner)]
    for value in plain:
        made = adapter.validate_python(value)
        assert made == value or (math.isnan(value) and math.isnan(made))
        assert type(made) is type(value)


def test_most_types_have_plain_values() -> None:
    hard = [hint for hint in TYPES if not any(is_plainly(value, hint) for value in VALUES)]
    assert len(hard) < len(TYPES) / 3


WORDS = [
    *("a", "", "-", "/", "no/such/path", "0", "1", "-1", "+1", "1_0", " 1", "1.5", ".5", "1e3", "nan", "inf", "²", "١"),
    *("9" * 12, "9" * 30, "true", "cpu", "CPU"),
]


def parameters() -> Iterator[Any]:
    seen = set()
    for command in every(_commands()):
        for one in (one for one in command.params if hasattr(one, "get_runtime_param")):
            told = one.type_descriptor.parameter_info
            key = (str(one.type_descriptor.annotation), told.min, told.max, one.multiple, one.nargs)
            if key not in seen:
                seen.add(key)
                yield pytest.param(one, id=f"{one.name} {key[0]}")


@pytest.mark.parametrize("parameter", list(parameters()))
def test_words_are_what_typer_makes_of_them(parameter: Any) -> None:
    def made(way: Any, value: Any) -> Any:
        try:
            found = way.coerce(value, param=parameter, ctx=None)
        except Exception as error:
            return type(error), str(error)
        return type(found), repr(found)

    library = type(parameter).get_runtime_param(parameter)
    several = parameter.multiple or parameter.nargs == -1
    values = [*([word] for word in WORDS), ["a", "1"], []] if several else [*WORDS, parameter.default]
    for value in [*values, None]:
        assert made(TypedWords(), value) == made(library, value), value
