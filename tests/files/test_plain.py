"""What an identity of a job compares: the same for what does the same, another for what does not."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from dataclasses import dataclass

import numpy as np
import pytest

from quark.files.plain import briefly, code_of, plain


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 2


@dataclass
class Point:
    x: int
    y: object


class Thing:
    def __init__(self, value):
        self.value = value

    def doubled(self):
        return self.value * 2


def added(value, to=1):
    return value + to


HERE = __name__


@pytest.mark.parametrize("value", [None, True, 3, -1.5, "a word"])
def test_simple_values_stand_for_themselves(value):
    assert plain(value) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Colour.RED, "Colour.RED"),
        (Level.HIGH, "Level.HIGH"),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        ({"b": 1, "a": (2,)}, [["b", 1], ["a", [2]]]),
        ({"b", "a", "c"}, ["a", "b", "c"]),
        (frozenset({2, 1}), [1, 2]),
        (Point(1, [2]), ["Point", ["x", 1], ["y", [2]]]),
        (Point, f"{HERE}.Point"),
        (Thing(5), ["Thing", [["value", 5]]]),
        (Thing, f"{HERE}.Thing"),
        (object(), "<object object>"),
        (1 + 2j, "(1+2j)"),
        (functools.partial(Thing, 1, a=2), ["partial", f"{HERE}.Thing", [1], [["a", 2]]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stands_for_a_value(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value))


def test_what_holds_itself_ends_there_and_what_is_there_twice_is_told_twice():
    inner: list[object] = [1]
    assert plain([inner, inner]) == [[1], [1]]
    inner.append(inner)
    assert plain(inner) == [1, "itself"]


def test_what_the_caller_knows_is_asked_first_at_every_depth():
    def known(value):
        return "a thing" if isinstance(value, Thing) else None

    assert plain([Thing(1), {"a": Thing(2)}, Point(1, Thing(3))], known) == [
        "a thing",
        [["a", "a thing"]],
        ["Point", ["x", 1], ["y", "a thing"]],
    ]


def test_arrays_count_by_type_shape_and_content():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    digest = hashlib.blake2b(b"".join(value.tobytes() for value in values.flat), digest_size=16).hexdigest()
    assert plain(values) == ["float32", [2, 3], digest]
    assert plain(np.asfortranarray(values)) == plain(values)
    assert plain(np.float32(1)) == ["float32", [], hashlib.blake2b(b"\0\0\x80?", digest_size=16).hexdigest()]
    words = hashlib.blake2b(b"['a', None]", digest_size=16).hexdigest()
    assert plain(np.array(["a", None], object)) == ["object", [2], words]


def test_a_function_counts_by_name_and_code():
    assert plain(added) == [f"{HERE}.added", code_of(added)]
    assert len(bytes.fromhex(code_of(added))) == 8


def _made(text):
    found: dict[str, object] = {}
    exec(text, found)
    return found["f"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("def f(x): return x + 1", "\n\ndef f(x): return x + 1", True),
        ("def f(x): return x + 1", "def f(x): return x + 2", False),
        ("def f(x): return x + 1", "def f(x): return x - 1", False),
        ("def f(x): return x.real", "def f(x): return x.imag", False),
        ("def f(x, y=1): return x", "def f(x, y=2): return x", False),
        ("def f(x, *, y=1): return x", "def f(x, *, y=2): return x", False),
        ("def f(x): return [(lambda: 1)]", "def f(x): return [(lambda: 2)]", False),
        ("def f(x): return 1", "def f(x): return True", False),
    ],
)
def test_the_code_of_a_function_is_what_it_does(one, other, same):
    assert (code_of(_made(one)) == code_of(_made(other))) is same


def test_what_a_function_closes_over_counts_but_what_it_may_fill_does_not():
    def closing(value):
        return lambda: value

    assert code_of(closing(1)) == code_of(closing(1)) != code_of(closing(2))
    assert code_of(closing(Colour.RED)) != code_of(closing(Level.HIGH))
    for empty, full in (([], [1]), ({}, {1: 2}), (set(), {1})):
        assert code_of(closing(empty)) == code_of(closing(full))
    assert code_of(closing((1,))) != code_of(closing((2,)))


def test_a_function_may_close_over_what_is_not_there_yet():
    lines = ("def made():", " word = 1", " def f():", "  return word", " del word", " return f", "f = made()")
    unset, same = (_made("\n".join(lines)) for _ in range(2))
    assert code_of(unset) == code_of(same) != ""


def test_methods_and_wrapped_functions_have_the_code_of_what_they_wrap_and_classes_none():
    wrapped = functools.wraps(added)(lambda *values: added(*values))
    assert code_of(wrapped) == code_of(added)
    assert code_of(Thing(1).doubled) == code_of(Thing.doubled) != ""
    assert code_of(Thing) == code_of(len) == code_of(3) == ""
    assert plain(len) == "builtins.len"


def test_briefly_names_functions_and_objects_and_leaves_data():
    for data in ([1], (1,), {1}, {"a": 1}, np.zeros(2), np.float32(1), 3, None, Colour.RED, functools.partial(added)):
        assert briefly(data) is None
    assert briefly(Thing(1)) == briefly(Thing) == f"{HERE}.Thing"
    name, code = briefly(added)
    assert (name, code[1]) == (f"{HERE}.added", [])
    assert code[0] == added.__code__.co_code.hex()
