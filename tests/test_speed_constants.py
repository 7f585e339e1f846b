"""Constants that only say how much is worked on at a time: other values of them give the same results.

``tests/mutants/speed.tsv`` names them. Each row here does the work that a constant is about, once with it as it is and
once with others; the mutation tests leave alone what these tests have shown to change nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.mutants.places import constants
from tests.onnx_flow import models

from quark.files.identity import digests_of
from quark.numerics import array, chunks
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import FORMATS
from quark.numerics.ggml import GGML
from quark.numerics.granularity import Channel
from quark.numerics.packing import AWQ_ORDER, pack
from quark.observers.registry import rows_of
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
from quark.onnx.qdq.nbits_algorithms import NBits, nearest

Work = Callable[[Path], Any]
X = np.random.default_rng(3).standard_normal((37, 96)).astype(np.float32)


def clipped(folder: Path) -> list[np.ndarray]:
    return [array.clip(X, -0.5, 0.25), array.clip(X[:3], np.full((3, 1), -0.5, np.float32), np.float32(0.25))]


def codes(folder: Path) -> list[np.ndarray]:
    int8 = FORMATS["int8"]
    steps = np.linspace(0.01, 0.1, 37, dtype=np.float32)
    whole = [
        Coding(int8).quantize(X, 0.02, 3),
        Coding(int8).quantize(X[:0], 0.02, 3),
        Coding(int8).quantize(X[0, 0], 0.02, 3),
    ]
    return [*whole, Coding(int8, Channel(0)).quantize(X, steps, np.zeros(37)), Coding(int8).fake_quantize(X, 0.02, 3)]


def packed(folder: Path) -> list[np.ndarray]:
    nibbles = (np.arange(24 * 64, dtype=np.uint8) * 7 % 16).reshape(24, 64)
    turned = np.asfortranarray(nibbles)
    return [pack(nibbles, 4), pack(nibbles & 7, 3), pack(nibbles, 4, order=AWQ_ORDER), pack(turned, 4, order=AWQ_ORDER)]


def blocks(folder: Path) -> list[np.ndarray]:
    kernels = X.reshape(4, 37, 3, 8)[:, :32]
    return [FORMATS[name].round(kernels, 1) for name in ("mxfp4", "mx6", "bfp16")]


def ggml(folder: Path) -> list[np.ndarray]:
    rows = np.tile(X, (1, 8)).reshape(-1, 768)
    return [part for name in ("q4_0", "q6_k") for part in GGML[name].both(rows, np.abs(rows[:2]) + 1)]


def ranges(method: str) -> Work:
    def found(folder: Path) -> list[float]:
        grid = Grid(FORMATS["int8"], scale_rule="power_of_two" if method == "mse" else "float32")
        row, settings, (statistic,) = rows_of(method, 1, grid, {})
        for part in np.split(np.tile(X, (12, 12)).reshape(-1), 3):
            statistic.update(part)
        return [float(side) for side in row.find(statistic, grid, settings)]

    return found


def searched(folder: Path) -> list[np.ndarray]:
    from quark.observers.mse import search_rows

    return [np.asarray(side) for side in search_rows(X, Grid(FORMATS["int8"], scale_rule="power_of_two"))]


def in_pieces(folder: Path) -> list[Any]:
    from quark.observers.histogram import block_extremes

    return [*ranges("entropy")(folder), *block_extremes(np.tile(X, (60, 1)).reshape(-1))]


def matmul(folder: Path) -> list[Any]:
    made = [nearest(X, NBits(Bits=4, GroupSize=32, Symmetric=symmetric)) for symmetric in (True, False)]
    return [part for one in made for part in (one.codes, one.scales, one.zero_points)]


def small(folder: Path) -> list[np.ndarray]:
    graph = "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { a = Conv (x, w) y = Conv (a, v) }"
    proto = models.model(graph, {"w": models.normal(4, 4, 1, 1), "v": models.normal(4, 4, 1, 1, seed=1)}, 17)
    layer = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
    config = QConfig(layer, extra_options={"PrintSummary": False})
    result = ModelQuantizer(config).run(proto, None, [models.feeds(proto)])
    return [onnx.numpy_helper.to_array(one) for one in result.proto.graph.initializer]  # type: ignore[union-attr]


def digests(folder: Path) -> list[str]:
    paths = [folder / name for name in "abc"]
    for path in paths:
        path.write_bytes(path.name.encode() * 999)
    return list(digests_of(paths).values())


def shards(folder: Path) -> list[bytes]:
    import torch

    from quark.torch.export.shards import item_of, write_shards

    target = folder / "model"
    target.mkdir(exist_ok=True)
    write_shards(target, [item_of(f"t{k}", torch.full((5, k + 1), float(k))) for k in range(9)], shard_size=300)
    return [path.read_bytes() for path in sorted(target.iterdir())]


ROWS: dict[tuple[str, str], tuple[Work, tuple[int, ...]]] = {
    ("quark/numerics/array.py", "CLIP_SIZE"): (clipped, (1, 1 << 20)),
    ("quark/numerics/chunks.py", "SMALL"): (codes, (0, 1, 1 << 20)),
    ("quark/numerics/packing.py", "CACHED"): (packed, (1, 100, 1 << 20)),
    ("quark/numerics/blocks.py", "SHORT_LOOP"): (blocks, (0, 1, 1 << 20)),
    ("quark/numerics/ggml.py", "PART"): (ggml, (1, 1000, 1 << 20)),
    ("quark/observers/entropy.py", "AT_ONCE"): (ranges("entropy"), (1, 1 << 22)),
    ("quark/observers/mse.py", "SMALL"): (searched, (1, 1 << 22)),
    ("quark/observers/histogram.py", "CHUNK"): (in_pieces, (1 << 10, 1 << 20)),
    ("quark/observers/histogram.py", "PATIENCE"): (ranges("entropy"), (0, 1, 1 << 30)),
    ("quark/onnx/qdq/nbits_algorithms.py", "CHUNK"): (matmul, (1, 200, 1 << 22)),
    ("quark/onnx/qdq/small_weights.py", "SMALL"): (small, (0, 1 << 20)),
    ("quark/onnx/qdq/small_weights.py", "TOGETHER"): (small, (1, 1 << 20)),
    ("quark/files/identity.py", "PIECE"): (digests, (1, 7, 1 << 20)),
    ("quark/files/identity.py", "READERS"): (digests, (1, 7)),
    ("quark/torch/export/shards.py", "MAKERS"): (shards, (1, 9)),
}


def test_every_constant_that_mutants_leave_alone_has_a_row() -> None:
    assert set(ROWS) == set(constants())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_another_value_changes_nothing(row: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, values = ROWS[row]
    file, name = row
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    expected = work(tmp_path)
    for value in values:
        chunks.pieces_of.cache_clear()
        monkeypatch.setattr(module, name, value)
        for ours, theirs in zip(work(tmp_path), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_rows_of_equivalent_mutants_name_lines_that_are_there() -> None:
    """A line that has changed is to be looked at again."""
    root = Path(__file__).parents[1]
    rows = (root / "tests" / "mutants" / "equivalent.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for row in rows:
        file, line, was, becomes, reason = row.split("\t")
        there = {text.strip() for text in (root / "src" / file).read_text(encoding="utf-8").splitlines()}
        assert line in there, row
        assert was == becomes == "*" or was in line, row
        assert reason
