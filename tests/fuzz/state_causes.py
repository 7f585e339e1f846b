"""Damage to what jobs go on with, and to plans: resume files with their tensors, ledgers, marks of folders, plan files.

Everything is damaged that a real job of each kind has written: every field, at every depth, with every odd value.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
from tests.fuzz.causes import Cause, Finding
from tests.fuzz.config_causes import VALUES
from tests.fuzz.torch_causes import TEXTS
from tests.onnx_flow import models

from quark.config.plan import TensorPlan
from quark.config.plan_diff import differences, read_plan
from quark.config.tensor import TensorSpec
from quark.files.journal import Journal
from quark.measure.score import Score
from quark.onnx.recipes import Choice
from quark.onnx.trials import OnnxTrial, Probed, remembered
from quark.search.auto import KeptTrial, kept_score

with contextlib.suppress(ImportError):  # before a process is forked for every cause
    import quark.torch.files.target  # noqa: F401

Job = dict[str, str]
BELONGS: Job = {"model": "0" * 16, "data": "1" * 16, "purpose": "npu"}
ARRAYS = {"low": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), "codes": np.array([3, -3], np.int8)}
TRIALS: dict[str, Any] = {
    "trial XINT8": {
        "error": "", "bytes": 1000, "passes": 1, "proposals": ["set Percentile"], "metric": 0.5, "chance": float("nan"),
        "digest": "a0", "same": "", "name": "y", "level": 2, "reason": "SQNR of y 44.4 dB", "value": 44.4, "sqnr": 44.4,
    },
    "float model": {"value": 0.5, "without": [0.4, 0.6]},
    "probe XINT8": {"rank": [1.0, 44.4], "digest": "a0"},
    "trial fp8": 12.5,
    "trial fp8+gptq": {"error": "", "value": 9.5, "chance": 0.1, "passes": 1},
    "conv1 as A8W8": {"value": 0.5, "size": 100},
}  # fmt: skip

# ---- what reads them -------------------------------------------------------------------------------------------------


def read(folder: Path) -> None:
    """Go on with what is in a folder, or compare its plans.

    Raises:
        Finding: remembered arrays that are not those that were kept.
    """
    for name, reads in (("state.json", resume), ("ledger.json", ledger), ("job", mark), ("plan.json", plans)):
        if (folder / name).exists():
            reads(folder / name)


def resume(path: Path) -> None:
    kept = Journal(path, BELONGS)
    for key in ("one", "two"):
        found = kept.arrays(f"ranges {key}")
        if found is not None and any(not np.isfinite(one.astype(np.float64)).all() for one in found.values()):
            raise Finding("numbers that nobody kept")


def ledger(path: Path) -> None:
    book = Journal(path, BELONGS)
    found = remembered(book, OnnxTrial.of(Choice("XINT8")))
    kept_score(book, "float model", lambda: Score(1.0))
    book.done("probe XINT8", Probed)
    book.done("conv1 as A8W8", dict[str, float], ("value", "noise"))
    if found is not None and found[0].judged is not None and not 0 <= found[0].judged.level < 3:
        raise Finding("a level that there is not")
    book.done("trial fp8+gptq", KeptTrial)
    if book.done("trial fp8", float) is not None:
        book.number("trial fp8", lambda: 1.0)
    book.settle()


def mark(path: Path) -> None:
    from quark.torch.files.target import begin

    begin(path, BELONGS)


def plans(path: Path) -> None:
    pair = read_plan(path), read_plan(path.with_name("other.json"))
    found = [*differences(*pair), *differences(*reversed(pair))]
    for one in found:
        if not (isinstance(one.before, str) and isinstance(one.after, str)):
            raise Finding("a difference without words")


# ---- what jobs write -------------------------------------------------------------------------------------------------


@lru_cache
def written(kind: str) -> dict[str, bytes]:
    """The files of an unfinished job of a kind, by their paths."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        KINDS[kind](folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resumed(folder: Path) -> None:
    kept = Journal(folder / "state.json", BELONGS)
    kept.finish_arrays("ranges one", ARRAYS)
    kept.finish_arrays("ranges two", ARRAYS)
    kept.settle()


def booked(folder: Path) -> None:
    book = Journal(folder / "ledger.json", BELONGS)
    for name, value in TRIALS.items():
        book.finish(name, value)
    book.settle()


def marked(folder: Path) -> None:
    from quark.torch.files.target import begin

    begin(folder / "job", BELONGS).settle()
    (folder / "job" / "model.safetensors").write_bytes(b"weights of which the first part is done")


def planned(folder: Path) -> None:
    from quark.onnx import ModelQuantizer, QConfig

    proto, config = models.conv_chain(2), QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options["PrintSummary"] = False
    plan = ModelQuantizer(config).run(proto, folder / "q.onnx", [models.feeds(proto)]).plan
    shutil.rmtree(folder / "q.onnx", ignore_errors=True)
    (folder / "q.onnx").unlink()
    told = json.loads(plan.to_json())
    seen: set[str] = set()
    told["tensors"] = [one for one in told["tensors"] if one["role"] not in seen and not seen.add(one["role"])]
    told["nodes"], told["floats"] = told["nodes"][:1], {"z": "nobody asked"}
    (folder / "plan.json").write_text(json.dumps(told))
    (folder / "other.json").write_text(plan.to_json())


KINDS: dict[str, Callable[[Path], None]] = {"resume": resumed, "ledger": booked, "mark": marked, "plan file": planned}
MAIN = {"resume": "state.json", "ledger": "ledger.json", "mark": "job/quark_progress.json", "plan file": "plan.json"}

# ---- damage ----------------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, outer ones too."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from leaves(one, (*path, key))


def changed(value: Any, path: tuple[Any, ...], put: Callable[[Any, Any], None]) -> Any:
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    put(inner, path[-1])
    return made


def write(kind: str, changes: dict[str, bytes | None], folder: Path) -> None:
    """The files of a job, some of them with other contents, or gone."""
    for name, content in {**written(kind), **changes}.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def with_field(kind: str, path: tuple[Any, ...], put: Callable[[Any, Any], None], folder: Path) -> None:
    told = json.loads(written(kind)[MAIN[kind]])
    text = json.dumps(changed(told, path, put))
    write(kind, {MAIN[kind]: text.encode("utf-8", "surrogatepass")}, folder)


def of_fields(kind: str, sample: Any) -> Iterator[Cause]:
    """Every field gone, and with odd values in turn: all of them on outer fields, every fourth on inner ones."""

    def set_to(value: Any) -> Callable[[Any, Any], None]:
        return lambda inner, key: inner.__setitem__(key, value)

    def gone(inner: Any, key: Any) -> None:
        if key != "second":  # a spec says it only where it has a second stage
            del inner[key]

    for number, path in enumerate(leaves(sample)):
        name = ".".join(map(str, path))
        yield Cause(kind, name, "gone", partial(with_field, kind, path, gone))
        for index, value in enumerate(VALUES):
            if len(path) < 2 or (number + index) % 4 == 0:
                yield Cause(kind, name, f"{index}: {value!r:.20}", partial(with_field, kind, path, set_to(value)))
        if isinstance(path[-1], str):
            more = partial(with_field, kind, (*path[:-1], f"{path[-1]}2"), set_to(1))
            yield Cause(kind, name, "a stranger beside it", more)


def of_texts(kind: str) -> Iterator[Cause]:
    """The whole text: another one, cut, with more behind; the file a folder."""
    for damage, content in TEXTS.items():
        yield Cause(kind, "text", damage, partial(write, kind, {MAIN[kind]: content}))
    for share in (0.1, 0.5, 0.9, 0.99):
        yield Cause(kind, "text", f"cut at {share}", partial(cut, kind, MAIN[kind], share))
    yield Cause(kind, "file", "as it should be", partial(write, kind, {}))


def cut(kind: str, name: str, share: float, folder: Path) -> None:
    content = written(kind)[name]
    write(kind, {name: content[: int(len(content) * share)]}, folder)


TENSOR = [one.name for one in fields(TensorPlan)]
SPEC = [one.name for one in fields(TensorSpec)]
SKETCHES: dict[str, Any] = {
    "resume": {
        "version": 2, "belongs": BELONGS, "next": 2, "values": {},
        "tensors": {"ranges one": {"file": "0.safetensors", "crc32": 1, "size": 158, "types": {"low": "bfloat16"}}},
    },
    "ledger": {"version": 2, "belongs": BELONGS, "next": 0, "values": {**TRIALS}, "tensors": {}},
    "mark": {"version": 2, "belongs": BELONGS, "next": 0, "values": {}, "tensors": {}},
    "plan file": {
        "tensors": [dict.fromkeys(TENSOR, 0) | {"spec": dict.fromkeys(SPEC, 0) | {"granularity": {"kind": 0}}}],
        "nodes": [{"name": 0, "op_type": 0, "quantized": 0, "reason": 0}], "proposals": [], "floats": {"z": 0},
    },
}  # fmt: skip

RESUMES, LEDGERS, MARKS, PLAN_FILES = (
    [*of_fields(kind, SKETCHES[kind]), *of_texts(kind)] for kind in ("resume", "ledger", "mark", "plan file")
)


def tensors_as(kind: str, folder: Path) -> None:
    """The file of tensors of a resume file is something else."""
    write("resume", {"state.tensors/0.safetensors": None}, folder)
    place = folder / "state.tensors" / "0.safetensors"
    if kind == "a folder":
        place.mkdir()
    elif kind == "a link to a stranger":
        (folder / "stranger").write_bytes(b"x" * 26)
        place.symlink_to(folder / "stranger")
    elif kind in ("a byte more", "a byte less", "flipped"):
        whole = written("resume")["state.tensors/0.safetensors"]
        place.write_bytes(
            {"a byte more": whole + b"x", "a byte less": whole[:-1], "flipped": b"\xff" + whole[1:]}[kind]
        )


for damage in ("gone", "a folder", "a link to a stranger", "a byte more", "a byte less", "flipped"):
    RESUMES.append(Cause("resume", "the file of tensors", damage, partial(tensors_as, damage)))
for damage in ("strangers.txt", "config.json", "a file", "a link"):

    def beside(what: str, folder: Path) -> None:
        """Without a mark the folder is somebody's."""
        write("mark", {MAIN["mark"]: None}, folder)
        (folder / "job" / what).write_bytes(b"mine")

    MARKS.append(Cause("mark", "mark gone, beside it", damage, partial(beside, damage)))
