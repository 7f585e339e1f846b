"""Damage to files that single options or tools name: pairs, subgraphs, algorithms, ids, masks, texts, results."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.causes import Cause, Finding
from tests.fuzz.config_causes import VALUES
from tests.fuzz.data_causes import ARCHIVES, FILES, PICTURES, late, npy, npz, paint
from tests.fuzz.torch_causes import TEXTS

from quark.numerics.array_files import load_array
from quark.onnx.algorithms.quarot import read_pairs
from quark.onnx.image_files import read_mask
from quark.onnx.quantization.config.mixprecision import AutoMixprecisionConfig
from quark.onnx.tools import convert_onnxtxt_to_onnx
from quark.onnx.tools.evaluate import compare_folders

with contextlib.suppress(ImportError):
    import quark.torch  # noqa: F401 - before a process is forked for every cause

ODD = (*VALUES, 10**400, float("nan"), float("inf"), [1], ["a", 1], [["a"]], [[]], "abc", {"a": ["b"]}, False)

PAIRS: list[Cause] = []
SUBGRAPHS: list[Cause] = []
ALGORITHMS: list[Cause] = []
IDS: list[Cause] = []
MASKS: list[Cause] = []
MODEL_TEXTS: list[Cause] = []
RESULTS: list[Cause] = []


def read(folder: Path) -> None:
    """Read what a cause has written.

    Raises:
        Finding: an answer that is none.
    """
    for name, reader in BY_NAME.items():
        if (folder / name).exists():
            reader(folder / name)


def names(found: object) -> bool:
    return isinstance(found, list | tuple) and all(isinstance(one, str) for one in found)


def pairs(path: Path) -> None:
    for one in read_pairs(str(path)):
        if not names(one["prev_nodes"]) or not names(one["next_nodes"]):
            raise Finding("a pair without names")


def subgraphs(path: Path) -> None:
    for name, one in AutoMixprecisionConfig(subgraph_json=str(path)).subgraphs():
        if not isinstance(name, str) or not names(one.start) or not names(one.end) or set("abc") & set(one.start):
            raise Finding("nodes that no file names")


def algorithm(path: Path) -> None:
    from quark.torch.config.algorithms import load_quant_algo_config_from_file

    found = load_quant_algo_config_from_file(path)
    for value in found.to_dict().values():
        if isinstance(value, float) and not np.isfinite(value):
            raise Finding("a number that is not finite")


def ids(path: Path) -> None:
    from quark.torch.token_files import read_array

    lowest = min((int(row.min()) for row in read_array(path) if row.size), default=0)
    if lowest < 0 and path.suffix == ".npy" and load_array(path).dtype.kind == "u":
        raise Finding("an id that wrapped around")


def mask(path: Path) -> None:
    for resize in ("stretch", "letterbox", "crop"):
        if read_mask(path, (4, 5), resize, 255).shape != (4, 5):
            raise Finding("a mask of another size")


def model_text(path: Path) -> None:
    given = argparse.Namespace(input=str(path), output=str(path.with_name("result.onnx")), save_as_external_data=False)
    convert_onnxtxt_to_onnx.run(given)


def results(path: Path) -> None:
    for one in compare_folders(path, path):
        if one.l2 != 0 and not np.isnan(one.l2):
            raise Finding("a file that differs from itself")


BY_NAME = {
    "pairs.json": pairs,
    "subgraphs.json": subgraphs,
    "algorithm.json": algorithm,
    "ids.npy": ids,
    "ids.npz": ids,
    "mask.png": mask,
    "model.txt": model_text,
    "results": results,
}


def put(name: str, content: bytes, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def wrong(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Every value of a document (outer ones too) with every odd one in its place, and gone."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        for number, odd in enumerate(ODD):
            made = copy.deepcopy(value)
            made[key] = odd
            yield (*path, key), f"{number}: {odd!r:.20}", made
        made = copy.deepcopy(value)
        del made[key]
        yield (*path, key), "gone", made
        for inner, damage, changed in wrong(value[key], (*path, key)):
            made = copy.deepcopy(value)
            made[key] = changed
            yield inner, damage, made


PAIR = {"prev_nodes": ["p"], "norm_node": "n", "next_nodes": ["q"]}
SUBGRAPH = {"name": "s", "start_nodes": ["p"], "end_nodes": ["q"]}
DOCUMENTS: tuple[tuple[list[Cause], str, str, dict[str, Any]], ...] = (
    (PAIRS, "pairs", "", {"R1_pairs": [PAIR]}),
    (SUBGRAPHS, "subgraphs", "", {"subgraphs": [SUBGRAPH], "num_subgraphs": 1, "quantized": False}),
    (ALGORITHMS, "algorithm", "gptq ", {"name": "gptq", "block_size": 64, "damp_percent": 0.1, "desc_act": True}),
    (ALGORITHMS, "algorithm", "smooth ", {"name": "smooth", "alpha": 0.5, "scale_clamp_min": 0.1, "layers": ["p"]}),
    (ALGORITHMS, "algorithm", "autoround ", {"name": "autoround", "lr": 0.1, "iters": 3, "batch_size": 2}),
    (ALGORITHMS, "algorithm", "rotation ", {"name": "rotation", "rotation_size": 8, "r1": True}),
)
for causes, reader, kind, document in DOCUMENTS:
    name = f"{reader}.json"
    causes.append(Cause(reader, f"{kind}file", "as it should be", partial(put, name, json.dumps(document).encode())))
    for path, damage, made in wrong(document):
        field = kind + ".".join(map(str, path))
        causes.append(Cause(reader, field, damage, partial(put, name, json.dumps(made).encode())))
for causes, reader in ((PAIRS, "pairs"), (SUBGRAPHS, "subgraphs"), (ALGORITHMS, "algorithm")):
    for damage, content in TEXTS.items():
        causes.append(Cause(reader, "text", damage, partial(put, f"{reader}.json", content)))

# ---- arrays and pictures ---------------------------------------------------------------------------------------------

ARRAYS = {
    "as they should be": np.arange(6).reshape(2, 3),
    "uint64 beyond int64": np.array([2**63 + 5], np.uint64),
    "one integer": np.array(1),
    "no rows": np.zeros((0, 3), np.int64),
    "empty rows": np.zeros((3, 0), np.int64),
    "three axes": np.zeros((1, 2, 3), np.int64),
    "bool": np.ones(3, bool),
}
for damage, array in ARRAYS.items():
    IDS.append(Cause("ids", "values", damage, partial(put, "ids.npy", npy(array))))
    IDS.append(
        Cause("ids", "values in an archive", damage, partial(put, "ids.npz", npz({"input_ids.npy": npy(array)})))
    )
for (field, damage), content in FILES.items():
    if "should be" not in damage:  # floats
        IDS.append(Cause("ids", field, damage, partial(put, "ids.npy", content)))
        RESULTS.append(Cause("results", field, damage, partial(put, "results/d.npy", content)))
for (field, damage), content in ARCHIVES.items():
    if "should be" not in damage:
        IDS.append(Cause("ids", f"archive: {field}", damage, partial(put, "ids.npz", content)))
RESULTS.append(Cause("results", "file", "as it should be", partial(put, "results/d.npy", npy())))


def drawn(name: str, picture: Any, folder: Path) -> None:
    """A picture of the table, under another name."""
    paint(picture, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "a.png").rename(folder / name)


MASKS.append(Cause("mask", "file", "as it should be", partial(drawn, "mask.png", late("PNG", "L"))))
for (field, damage), picture in PICTURES.items():
    if "should be" not in damage:
        MASKS.append(Cause("mask", field, damage, partial(drawn, "mask.png", picture)))
        RESULTS.append(Cause("results", f"picture: {field}", damage, partial(drawn, "results/p.png", picture)))

# ---- texts of models -------------------------------------------------------------------------------------------------

TENSOR = "type { tensor_type { elem_type: 1 shape { dim { dim_value: 2 } } } }"
GRAPH = (
    'ir_version: 8 opset_import { version: 17 } graph { name: "g" node { op_type: "Relu" input: "x" output: "y" } '
    f'input {{ name: "x" {TENSOR} }} output {{ name: "y" {TENSOR} }} }}'
)
MODELS: dict[tuple[str, str], bytes] = {
    ("file", "as it should be"): GRAPH.encode(),
    ("file", "UTF-16"): GRAPH.encode("utf-16"),
    ("file", "behind a comment"): b"#" * 100_000 + b"\n" + GRAPH.encode(),
    ("nesting", "5,000 graphs"): b"graph { node { attribute { g { " * 5000,
    ("nesting", "400 graphs, closed"): b"graph { " + b"node { attribute { g { " * 400 + b" } } }" * 400 + b" }",
    ("ir_version", "5,000 digits"): b"ir_version: " + b"9" * 5000,
    ("ir_version", "a text"): b'ir_version: "a"',
    ("ir_version", "twice"): b"ir_version: 8 " + GRAPH.encode(),
    ("name", "NUL"): GRAPH.replace('"g"', '"\\0"').encode(),
    ("name", "not UTF-8"): GRAPH.encode().replace(b'"g"', b'"\xff"'),
    ("name", "escaped, not UTF-8"): GRAPH.replace('"g"', '"\\xff"').encode(),
    ("name", "an octal number too large"): GRAPH.replace('"g"', '"\\777"').encode(),
    ("name", "a lone surrogate"): GRAPH.replace('"g"', '"\\ud800"').encode(),
    ("field", "unknown"): b"zzz: 1",
    ("field", "of an extension"): b"[type.googleapis.com/x] { a: 1 }",
    ("initializer", "10^11 numbers"): b'graph { initializer { dims: 99999999999 data_type: 1 name: "a" } }',
    ("initializer", "beyond float"): b'graph { initializer { dims: 1 data_type: 1 name: "a" float_data: 1e999999 } }',
}
for share in range(1, 30):
    MODELS["file", f"cut at {share} of 30"] = GRAPH[: len(GRAPH) * share // 30].encode()
for word in ("ir_version: 8", "17", '"Relu"', '"x"', '"y"', "elem_type: 1", "dim_value: 2", "node", "{"):
    for odd in ("", "-1", "99999999999999999999", '"\\n"', "{ }"):
        MODELS[f"text {word}", f"becomes {odd}"] = GRAPH.replace(word, odd, 1).encode()
for (field, damage), content in MODELS.items():
    MODEL_TEXTS.append(Cause("model text", field, damage, partial(put, "model.txt", content)))
for damage, content in TEXTS.items():
    MODEL_TEXTS.append(Cause("model text", "text", damage, partial(put, "model.txt", content)))
