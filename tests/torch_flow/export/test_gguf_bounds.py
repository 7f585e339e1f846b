"""The bound under which a GGUF file is read back: what rounding needs, and no broken scale."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow.export.test_gguf import bpe, model_of  # noqa: F401
from tests.torch_flow.export.test_reload import quantized

from quark.errors import ModelError
from quark.numerics.ggml import Ggml
from quark.torch import LLMTemplate
from quark.torch.export import gguf_tensors
from quark.torch.export.api import export_gguf
from quark.torch.export.gguf_bounds import GRIDS, SLACK, allowed, beyond
from quark.torch.export.gguf_tensors import rounded
from quark.torch.quantized_layer import quantized_layers

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
SCALE = {  # where a block has the scale of a few of its numbers: byte, and bytes of a block
    "Q4_0": (1, 18), "Q4_1": (1, 20), "Q5_0": (1, 22), "Q5_1": (1, 24), "Q8_0": (1, 34),
    "Q2_K": (81, 84), "Q3_K": (109, 110), "Q4_K": (1, 144), "Q5_K": (1, 176), "Q6_K": (209, 210),
}  # fmt: skip


def samples() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    normal = draw.standard_normal((64, 512))
    blocks = np.repeat(10.0 ** draw.uniform(-3, 1, (64, 16)), 32, 1)
    made = (
        normal,
        draw.standard_t(1.5, (64, 512)),
        draw.random((64, 512)),
        -3 - draw.random((64, 512)),
        np.sign(normal),
    )
    return [one.astype(np.float32) for one in (*made, normal * 1e-3, normal * blocks, 0 * normal)]


def decoded(data: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(shape)


@pytest.mark.parametrize("kind", GRIDS)
def test_no_rounding_is_beyond_its_bound_and_some_is_with_four_times_the_error(kind: str) -> None:
    over = 0
    for values in samples():
        apart = decoded(rounded(values, kind), kind, values.shape) - values
        assert beyond(kind, values, apart) == 0
        over += beyond(kind, values, 4 * apart)
    assert over > 0


@pytest.mark.parametrize("kind", GRIDS)
def test_one_broken_scale_of_a_tensor_is_an_error(
    kind: str, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """One block of thousands, its scale half or twice as large: an exponent one off."""
    byte, size = SCALE[kind]

    def broken(values: np.ndarray, to: str) -> Any:
        data = rounded(values, to)
        if to == kind:
            data = data.copy()
            data.reshape(-1, size)[-1, byte] ^= 4  # the lowest bit of the exponent of a float16
        return data

    monkeypatch.setattr(gguf_tensors, "rounded", broken)
    with pytest.raises(ModelError, match=r"reads back with \d+ of \d+ numbers further"):
        export_gguf(model_of(), tmp_path / "m", "llama", bpe, weight_type=kind)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("broken", ["", "scale", "weights", "last row"])
def test_codes_are_searched_once_and_what_is_written_is_what_the_quantizer_makes(
    kind: str, broken: str, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Reading back a file costs no second search; a broken scale in it, or other weights than the model's, are seen."""
    model = quantized(model_of(), LLMTemplate.get("llama").get_config(kind))
    (byte, size), both, source, searched = SCALE[kind], Ggml.both, gguf_tensors.source_of, [0]
    numbers = sum(layer.weight.numel() for _, layer in quantized_layers(model))

    def counted(row: Ggml, rows: np.ndarray, importance: Any = None) -> Any:
        searched[0] += rows.size
        return search(row, rows, importance)

    def off(row: Ggml, *what: Any) -> Any:
        data, values = both(row, *what)
        data.reshape(-1, size)[-1, byte] ^= 4
        return data, values

    search = Ggml.fields
    monkeypatch.setattr(Ggml, "fields", counted)
    if broken == "scale":
        monkeypatch.setattr(Ggml, "both", off)
    if broken == "weights":
        monkeypatch.setattr(gguf_tensors, "source_of", lambda layer: 1.1 * source(layer))
    if broken == "last row":
        monkeypatch.setattr(gguf_tensors, "source_of", lambda layer: torch.cat([source(layer)[:-1], source(layer)[:1]]))
    with pytest.raises(ModelError, match="reads back with") if broken else nullcontext():
        loss = export_gguf(model, tmp_path / "m", "llama", bpe)
        assert loss.relative == 0 and numbers <= searched[0] <= 1.2 * numbers
    assert broken == "" or not (tmp_path / "m").exists()


@pytest.mark.parametrize(("kind", "low", "high", "step"), [
    ("Q4_1", 2.0, 5.0, 3 / 15), ("Q5_1", -5.0, -2.0, 3 / 31), ("Q4_K", 2.0, 5.0, 5 / 15), ("Q5_K", -5.0, -2.0, 5 / 31),
    ("Q2_K", -1.0, 5.0, 6 / 3), ("Q8_0", -1.0, 5.0, 5 / 127),
])  # fmt: skip
def test_what_a_block_may_be_off_is_half_a_step_and_what_its_scales_round(
    kind: str, low: float, high: float, step: float
) -> None:
    """Q4_1 and Q5_1 store where they begin; K-quants begin at 0 or below, and their scales have six bits (Q2_K: four).

    The rest: scales and minima rounded to multiples of the largest are half a multiple off, those over all codes.
    """
    row = GRIDS[kind]
    blocks = np.linspace(low, high, row.sub, dtype=np.float32)[None].repeat(row.size // row.sub, 0)
    start = {"K": min(low, 0.0), "1": low}.get(kind[-1], 0.0)
    most = step / 2
    if kind.endswith("K"):
        units = row.units
        most += (row.largest + 1) * step / units / 2 - start / units / 2
    rest = (row.largest + 1) * step * 2**-11 + abs(start) * 2**-11  # of float16
    found = allowed(row, blocks)
    assert found.shape == (len(blocks),)
    assert ((found >= most + rest) & (found <= (most + rest) * (1 + 2 * SLACK))).all()
