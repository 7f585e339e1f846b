"""Files from strangers: nothing outside is touched, nothing large is made of them, every refusal is one sentence."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import yaml
from pydantic import BaseModel, ValidationError
from tests.onnx_flow import models

from quark.errors import ConfigError, ModelError, QuarkError
from quark.files.journal import Journal
from quark.files.schema import OpenSchema, Schema
from quark.files.untrusted import parse_yaml, read_settings, unpacked_text
from quark.onnx.explain import KEY, explain
from quark.onnx.shapeshifter import read
from quark.onnx.shapeshifter import transform as shapeshifter
from quark.search.plan_file import read_config

FIRST = "0.safetensors"
NAMES = [
    *(
        "../victim",
        "../../victim",
        "/etc/hostname",
        "C:\\victim",
        "..\\victim",
        f"sub/{FIRST}",
        f"./{FIRST}",
        f"{FIRST}/",
    ),
    *("", ".", "..", f"{FIRST}\0", f"{FIRST}\n", "~/x", "0", f"{FIRST.upper()}.", "x" * 300, "state.json", "NUL"),
    f"{FIRST}:stream",
]


def kept(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file of a job with two entries."""
    journal = Journal(folder / "state.json", {"a": "1"})
    journal.finish_arrays("tune first", {"w": np.arange(3.0)})
    journal.finish_arrays("tune second", {"w": np.arange(4.0), "codes": np.zeros(4, ml_dtypes.int4)})
    journal.finish("conv as A8W8", {"sqnr": float("inf"), "kl": 0.1})
    journal.settle()
    return folder / "state.json", json.loads((folder / "state.json").read_text())


def look(path: Path) -> Journal:
    """All that a job reads of it."""
    journal = Journal(path, {"a": "1"})
    for key in ("first", "second"):
        journal.arrays(f"tune {key}")
    journal.done("conv as A8W8", dict[str, float], ("sqnr",))
    return journal


def use(path: Path) -> None:
    """And all that it writes."""
    journal = look(path)
    journal.finish_arrays("tune first", {"w": np.zeros(2)})
    journal.finish_arrays("tune first", {"w": np.zeros(1)})
    journal.settle()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_names_another_file_touches_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "job").mkdir()
    path, state = kept(tmp_path / "job")
    state["tensors"]["tune first"]["file"] = name
    path.write_text(json.dumps(state))
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        use(path)
    assert "\n" not in str(caught.value) and snapshot(tmp_path) == before


LINKS = [FIRST, "2.safetensors", ".2.safetensors.part", ".state.json.part", ".state.json.previous"]


@pytest.mark.skipif(os.name == "nt", reason="links")
@pytest.mark.parametrize("name", LINKS)
def test_links_in_the_folder_are_not_followed_to_what_they_point_at(name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path, _ = kept(tmp_path)
    link = tmp_path / name if name.startswith(".state") else tmp_path / "state.tensors" / name
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    try:
        use(path)
    except ConfigError as error:
        assert "link" in str(error) or "damaged" in str(error)
    assert victim.read_text() == "precious"


def mutations(state: Any) -> Iterator[tuple[str, Any]]:
    """Every field of another type, gone, or with a stranger beside it; sizes that are lies."""
    odd = [None, True, -1, 2**70, 1.5, "x", "", [], {}, [[]], {"x": 1}, "9" * 400]

    def walk(value: Any, rebuild: Callable[[Any], Any], where: str) -> Iterator[tuple[str, Any]]:
        for one in odd:
            if type(one) is not type(value) or isinstance(value, int):
                yield f"{where}={one!r:.20}", rebuild(one)
        if isinstance(value, dict):
            yield f"{where}+stranger", rebuild({**value, "stranger": 1})
            for key in value:
                yield f"{where}-{key}", rebuild({name: item for name, item in value.items() if name != key})
                yield from walk(value[key], lambda new, key=key: rebuild({**value, key: new}), f"{where}.{key}")
        if isinstance(value, list):
            for k, item in enumerate(value):
                yield from walk(item, lambda new, k=k: rebuild([*value[:k], new, *value[k + 1 :]]), f"{where}[{k}]")

    yield from walk(state, lambda new: new, "")


def test_every_damage_of_a_state_is_one_sentence_or_harmless(tmp_path: Path) -> None:
    path, state = kept(tmp_path)
    refused = count = 0
    for what, damaged in mutations(state):
        path.write_text(json.dumps(damaged))
        count += 1
        try:
            look(path)
        except QuarkError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1500, what
    assert count > 250 and refused > 0.9 * count


def test_every_damage_of_a_ledger_is_one_sentence_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    book = Journal(path, {"model": "a", "data": "b"})
    book.finish("conv as A8W8", {"sqnr": float("inf"), "kl": 0.1})
    book.settle()
    state, refused, count = json.loads(path.read_text()), 0, 0
    for what, damaged in mutations(state):
        path.write_text(json.dumps(damaged))
        count += 1
        try:
            Journal(path, {"model": "a", "data": "b"})
        except QuarkError as error:
            refused += 1
            assert "\n" not in str(error), what
    assert count > 60 and refused > 0.6 * count


DEEP = 100_000
TEXTS = {
    "deep list": "[" * DEEP,
    "deep mapping": "{a: " * 3000 + "}" * 3000,
    "long number": f"a: {'9' * 5000}",
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "doubled": "a: 1\na: 2",
    "list as a key": "? [a]\n: 1",
    "a tag that builds": "a: !!python/object/apply:os.system [touch x]",
    "two documents": "a: 1\n---\nb: 2",
    "a tab": "a:\n\t- b",
    "open": "a: [",
    "NUL": "a: \0",
    **{f"the tag {tag}": f"a: !<{tag}> x" for tag in yaml.SafeLoader.yaml_constructors if tag},
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_yaml_is_one_sentence(name: str, tmp_path: Path) -> None:
    path, start = tmp_path / "c.yaml", time.process_time()
    path.write_text(TEXTS[name])
    for load in (lambda: parse_yaml(TEXTS[name], "it"), lambda: read_config(path, ("a",)), lambda: read(path)):
        with pytest.raises(ConfigError) as caught:
            load()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert time.process_time() - start < 10


def test_configurations_are_bounded_and_regular_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 30)
    for name in ("latin.yaml", "large.yaml", "gone.yaml"):
        with pytest.raises(ConfigError):
            read_settings(tmp_path / name, "the file")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.yaml")
        for load in (lambda path: read_config(path, ()), read):
            with pytest.raises(ConfigError, match="pipe"):
                load(tmp_path / "pipe.yaml")


def test_a_shapeshifter_file_replaces_no_file_of_anybodys(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "m.onnx")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "p.yaml").write_text(f"passes: [remove_input_init]\noutput_model_path: {tmp_path / 'victim'}\n")
    with pytest.raises(ConfigError, match="is not a result of quark"):
        shapeshifter(tmp_path / "m.onnx", tmp_path / "p.yaml")
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("kind", [Schema, OpenSchema])
def test_what_was_read_is_of_its_types_and_stays(kind: type[BaseModel]) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        number: int

    one = Own(number=1)
    with pytest.raises(ValidationError, match="frozen"):
        one.number = 2
    with pytest.raises(ValidationError, match="valid integer"):
        Own(number="1")
    with pytest.raises(ValidationError, match="other") if kind is Schema else nullcontext():
        Own(number=1, other=2)


def test_a_text_is_unpacked_as_it_was_packed_and_no_other() -> None:
    packed = base64.b64encode(zlib.compress(b"a text")).decode()
    assert unpacked_text(packed) == unpacked_text(packed, 6) == "a text"
    for damaged in (f"{packed[:4]}!{packed[4:]}", f"{packed[:4]} {packed[4:]}", packed[:-8], "", f"{packed[:-5]}A==="):
        with pytest.raises(ValueError, match=r"base64|cut off|[Pp]ad"):
            unpacked_text(damaged)
    with pytest.raises(ValueError, match=r"more than 5 bytes"):
        unpacked_text(packed, 5)


def test_the_decisions_in_a_model_are_bounded_and_checked(tmp_path: Path) -> None:
    def model(words: bytes) -> Path:
        proto = models.cnn()
        proto.metadata_props.add(key=KEY, value=words.decode("latin-1"))
        onnx.save(proto, tmp_path / "m.onnx")
        return tmp_path / "m.onnx"

    def packed(value: Any) -> bytes:
        return base64.b64encode(zlib.compress(json.dumps(value).encode()))

    good = {"version": 1, "tensors": {"x": "told"}, "nodes": {}, "floats": {}}
    assert explain(model(packed(good)), "x") == "told"
    bomb = base64.b64encode(zlib.compress(b"[" + b"0," * (1 << 26) + b"0]", 9))
    start = time.process_time()
    bad = [bomb, b"", b"????", packed([]), packed({**good, "tensors": {"x": 1}}), packed({**good, "x": 1})]
    bad += [packed(good)[:-8], base64.b64encode(zlib.compress(b"[" * 100_000)), packed({**good, "version": "1"})]
    for words in bad:
        with pytest.raises(ModelError, match="decisions"):
            explain(model(words), "x")
    assert time.process_time() - start < 10
    with pytest.raises(ValueError, match="more than 10 bytes"):
        unpacked_text(base64.b64encode(zlib.compress(b"x" * 11)).decode(), 10)


@pytest.mark.parametrize("base", [Schema, OpenSchema])
def test_what_a_file_held_does_not_change_afterwards(base: Any) -> None:
    made = type("Held", (base,), {"__annotations__": {"count": int}})
    held = made(count=3)
    with pytest.raises(ValidationError, match="frozen"):
        held.count = 4
    with pytest.raises(ValidationError):
        made(count="3")
