"""What the algorithms are called: in configurations of either flow, and where a name is typed."""

from __future__ import annotations

import re

from quark.dataclass import dataclass


@dataclass(frozen=True)
class AlgorithmNames:
    """One algorithm.

    Attributes:
        onnx: its name in configurations of the ONNX flow; "": it has none there.
        torch: the same for the torch flow.
        also: what else may be typed for it.
        samples: the torch flow needs samples for it.
        tunes: in the torch flow it runs at final scales, after the ranges are known; False: it changes the float model.
        codes: there it chooses codes under given steps, which types of GGML do not have.
    """

    onnx: str
    torch: str
    also: tuple[str, ...] = ()
    samples: bool = True
    tunes: bool = False
    codes: bool = False


ROWS = (
    AlgorithmNames("cle", "cle"),
    AlgorithmNames("channel_equalization", "channel_equalization", ("ce",)),
    AlgorithmNames("smooth_quant", "smooth", ("smoothquant",)),
    AlgorithmNames("", "autosmoothquant"),
    AlgorithmNames("awq", "awq"),
    AlgorithmNames("quarot", "rotation", samples=False),
    AlgorithmNames("svdquant", "svdquant"),
    AlgorithmNames("gptq", "gptq", tunes=True, codes=True),
    AlgorithmNames("gptaq", "gptaq", tunes=True, codes=True),
    AlgorithmNames("qronos", "qronos", tunes=True, codes=True),
    AlgorithmNames("autoround", "autoround", tunes=True, codes=True),
    AlgorithmNames("adaround", "adaround", tunes=True, codes=True),
    AlgorithmNames("adaquant", "adaquant", tunes=True, codes=True),
    AlgorithmNames("", "hqq", samples=False, tunes=True, codes=True),
    AlgorithmNames("bias_correction", "bias_correction", ("bc",), samples=False, tunes=True),
    AlgorithmNames("calibration_search", ""),
    AlgorithmNames("auto_mixprecision", ""),
)
ONNX = {name: row.onnx for row in ROWS if row.onnx for name in (row.torch, *row.also) if name not in ("", row.onnx)}
"""In the ONNX flow: what else may be typed -> the name."""
TORCH = {name: row.torch for row in ROWS if row.torch for name in (row.onnx, *row.also) if name not in ("", row.torch)}
"""The same for the torch flow."""
TUNING = tuple(row.torch for row in ROWS if row.tunes)
"""What can be for single layers of the torch flow."""


def parted(text: str) -> tuple[str, str]:
    """File and rest of ``FILE.py:NAME``, as somebody types an algorithm of their own; "" where there is no file."""
    found = re.fullmatch(r"(.+\.py):(.*)", text)
    return (found[1], found[2]) if found else ("", text)


def same(name: str) -> str:
    """What two names have in common that nobody tells apart: ``SmoothQuant`` is ``smooth_quant``."""
    return name.replace("_", "").lower()


TAKEN = {same(name) for row in ROWS for name in (row.onnx, row.torch, *row.also) if name}
"""All of them, by ``same``."""
