"""The bound under which a GGUF file is read back: what rounding needs, and no broken scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.torch_flow.export.test_gguf import bpe, model_of  # noqa: F401

from quark.errors import ModelError
from quark.torch.export import gguf_tensors
from quark.torch.export.api import export_gguf
from quark.torch.export.gguf_bounds import GRIDS, beyond
from quark.torch.export.gguf_tensors import rounded

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
