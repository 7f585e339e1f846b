"""Compare two folders of results: those of the float model and those of the quantized one.

Files (NPY, PNG, JPG) are matched by their path inside the folders. With baseline ``a`` and quantized ``b``, per file:

    cosine   a·b / (‖a‖ ‖b‖)
    L2       ‖a − b‖
    PSNR     20 log10(peak / √mean((a − b)²)), dB; peak = 255 for images, max |a| for arrays; ∞ when equal

Both spellings run: ``python -m quark.onnx.tools.evaluate`` and ``python -m quark.onnx.tools.evaluate.py``. Not handled:
arrays of text or objects, several arrays in one file (NPZ).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quark.dataclass import dataclass
from quark.errors import DataError
from quark.numerics import metrics
from quark.numerics.array_files import load_array
from quark.onnx.image_files import IMAGES, read_image

ARRAYS = (".npy",)


@dataclass(frozen=True)
class FileResult:
    """How far one file of the quantized folder is from its baseline."""

    name: str
    cosine: float
    l2: float
    psnr: float


def compare_folders(baseline: str | Path, quantized: str | Path) -> list[FileResult]:
    """Compare every NPY, PNG and JPG file of ``baseline`` with the file of the same relative name in ``quantized``.

    Raises:
        DataError: a folder is missing or holds no such file; a file has no counterpart, cannot be read, or differs in
            shape from its counterpart. The message names the file.
    """
    names = _matched(Path(baseline), Path(quantized))
    return [compare_files(name, Path(baseline) / name, Path(quantized) / name) for name in names]


def compare_files(name: str, baseline: Path, quantized: Path) -> FileResult:
    """Compare two files of one kind."""
    reference, value = read(baseline), read(quantized)
    if not reference.size:
        raise DataError(f"{name} holds no values")
    if reference.shape != value.shape:
        raise DataError(f"{name}: the baseline has the shape {reference.shape}, the quantized result {value.shape}")
    a, b = reference.astype(np.float64), value.astype(np.float64)
    is_image = baseline.suffix.lower() in IMAGES
    psnr = metrics.decibel(255.0**2, metrics.mse(a, b)) if is_image else metrics.psnr(a, b)
    return FileResult(name, metrics.cosine(a, b), metrics.l2(a, b), psnr)


def mean(results: Iterable[FileResult]) -> FileResult:
    """The arithmetic mean of each measure; the PSNR is infinite as soon as one file's is."""
    columns = [(result.cosine, result.l2, result.psnr) for result in results]
    cosine, l2, psnr = (float(column) for column in np.mean(columns, axis=0))
    return FileResult("mean", cosine, l2, psnr)


def read(path: Path) -> np.ndarray:
    """One result file as an array; images have the shape ``[height, width(, channels)]``."""
    return read_image(path) if path.suffix.lower() in IMAGES else np.asarray(load_array(path))


def _files(folder: Path) -> set[str]:
    if not folder.is_dir():
        raise DataError(f"the folder {folder} does not exist")
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in (*IMAGES, *ARRAYS))
    names = {path.relative_to(folder).as_posix() for path in paths}
    if not names:
        raise DataError(f"the folder {folder} holds no NPY, PNG or JPG file")
    return names


def _matched(baseline: Path, quantized: Path) -> list[str]:
    first, second = _files(baseline), _files(quantized)
    if lonely := sorted(first ^ second):
        there, missing = (baseline, quantized) if lonely[0] in first else (quantized, baseline)
        more = f" (and {len(lonely) - 1} more)" if len(lonely) > 1 else ""
        raise DataError(f"{lonely[0]} is in {there} but not in {missing}{more}")
    return sorted(first)
