"""Samples from files, read one at a time in the order of their names.

    samples.npz          one array per input, named like it; axis 0 counts the samples
    samples.npy          the same for a model with one input
    folder of *.npz      one file a sample, one array per input
    folder of *.npy      one file a sample, for a model with one input
    folder of folders    one folder per input, named like it, of .npy files; files of one name are one sample
    folder of images     .png, .jpg, .jpeg, resized to the input: value = (pixel / 255 - mean) / std, RGB

An array with one axis less than the input gets a batch axis. Only names, counts and types are looked at when the reader
is made. Not handled: crops that keep the aspect ratio, several images per sample: prepare .npy files for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.errors import DataError, unknown
from quark.numerics.array_files import ArrayArchive, load_array
from quark.onnx.data import CalibrationDataReader, Feed, ModelInput, inputs_of
from quark.onnx.graph.model import ModelInput as Source
from quark.onnx.graph.model import load
from quark.onnx.image_files import IMAGES, pillow, read_image
from quark.reading import regular_file

ARRAYS = (".npz", ".npy")
Read = Callable[[], Feed]


class PathDataReader(CalibrationDataReader):
    """Samples from a folder or an .npz file.

    Args:
        model_input: path or model; its inputs say what is looked for.
        data_path: folder or file, as the module describes.
        input_shape: sizes for the free axes of an image input, per input name.
        mean, std: of images, per channel or one for all, after division by 255.

    Raises:
        DataError: nothing there that fits the model's inputs; the message names what was found and what is needed.
    """

    def __init__(
        self,
        model_input: Source,
        data_path: str | Path,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        model = model_input if isinstance(model_input, ir.Model) else load(model_input)
        inputs = [_sized(one, dict(input_shape or {})) for one in inputs_of(model)]
        _check_names(input_shape or {}, inputs)
        self.data_path = Path(data_path)
        self._reads = find_samples(Path(data_path), inputs, Scaling(tuple(mean), tuple(std)))
        self._next = 0

    def __len__(self) -> int:
        return len(self._reads)

    def get_next(self) -> Feed | None:
        """The next sample, or None after the last."""
        self._next += 1
        return self._reads[self._next - 1]() if self._next <= len(self._reads) else None

    def rewind(self) -> None:
        """Start again from the first file."""
        self._next = 0


@dataclass(frozen=True)
class Scaling:
    """How pixels become input values, per channel or one for all: (pixel / 255 - mean) / std.

    Raises:
        DataError: a number that is not finite, or a ``std`` that is not above zero.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            bad = [number for number in numbers if not math.isfinite(number) or (name == "std" and number <= 0)]
            if bad or not numbers:
                given = bad[0] if bad else "nothing"
                above = " above zero" if name == "std" else ""
                raise DataError(f"{name} is {given}: every number must be finite{above}")


def find_samples(path: Path, inputs: Sequence[ModelInput], scaling: Scaling | None = None) -> list[Read]:
    """Functions that read one sample each.

    Raises:
        DataError: nothing at ``path`` can be read as samples for these inputs.
    """
    if not path.is_dir():
        regular_file(path, DataError, "the calibration data")
        return _from_file(path, inputs)
    if inputs and all(Path(one.name).name == one.name and (path / one.name).is_dir() for one in inputs):
        return _from_folders(path, inputs)
    files = {suffix: _files(path, (suffix,)) for suffix in ARRAYS} | {"image": _files(path, IMAGES)}
    kind = next((kind for kind, found in files.items() if found), None)
    if kind is None:
        raise DataError(
            f"the folder {str(path)!r} holds no .npy, .npz, .png or .jpg file, nor one folder per input "
            f"({', '.join(one.name for one in inputs)})"
        )
    if kind == ".npz":
        return [partial(_npz_sample, file, tuple(inputs)) for file in files[kind]]
    only = _only(inputs, f"a folder of {kind} files")
    if kind == ".npy":
        return [partial(_npy_sample, {only.name: file}, (only,)) for file in files[kind]]
    settled = scaling or Scaling()
    _check_image_input(only, settled)
    return [partial(_image_sample, file, only, settled) for file in files[kind]]


def _files(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes)


def _sized(one: ModelInput, shapes: Mapping[str, Sequence[int]]) -> ModelInput:
    if one.name not in shapes or one.shape is None:
        return one
    given = tuple(shapes[one.name])
    if len(given) != len(one.shape) or any(own not in (None, size) for own, size in zip(one.shape, given, strict=True)):
        raise DataError(f"input_shape gives {list(given)}, which does not fit the input {one}")
    return ModelInput(one.name, given, one.dtype)


def _check_names(given: Iterable[str], inputs: Sequence[ModelInput]) -> None:
    names = [one.name for one in inputs]
    for name in given:
        if name not in names:
            raise DataError(unknown("input in input_shape", name, names))


def _only(inputs: Sequence[ModelInput], what: str) -> ModelInput:
    if len(inputs) != 1:
        names = ", ".join(one.name for one in inputs)
        raise DataError(f"{what} feeds one input; the model has {len(inputs)} ({names}): use .npz files")
    return inputs[0]


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _from_file(path: Path, inputs: Sequence[ModelInput]) -> list[Read]:
    if path.suffix.lower() not in ARRAYS:
        raise DataError(f"the calibration data {str(path)!r} must be a folder, a .npz or a .npy file")
    arrays = _load(path)
    chosen = {one.name: _picked(arrays, one, inputs, path) for one in inputs}
    counts = {one.name: _count(chosen[one.name], one, path) for one in inputs}
    if len(set(counts.values())) > 1:
        raise DataError(f"{str(path)!r} holds different numbers of samples: {counts}")
    total = next(iter(counts.values()), 0)
    return [partial(_slices, chosen, tuple(inputs), index) for index in range(total)]


def _from_folders(path: Path, inputs: Sequence[ModelInput]) -> list[Read]:
    found = {one.name: {file.name: file for file in _files(path / one.name, (".npy",))} for one in inputs}
    names = sorted(set().union(*found.values()))
    for folder, files in found.items():
        missing = next((name for name in names if name not in files), None)
        if missing is not None:
            raise DataError(f"the folder {str(path / folder)!r} lacks {missing!r}, which another input's folder has")
    if not names:
        raise DataError(f"the folders {list(found)} in {str(path)!r} hold no .npy file")
    return [partial(_npy_sample, {key: found[key][name] for key in found}, tuple(inputs)) for name in names]


def _npz_sample(file: Path, inputs: Sequence[ModelInput]) -> Feed:
    arrays = _load(file)
    return {one.name: _batched(_picked(arrays, one, inputs, file), one) for one in inputs}


def _npy_sample(files: Mapping[str, Path], inputs: Sequence[ModelInput]) -> Feed:
    return {one.name: _batched(_load(files[one.name])[""], one) for one in inputs}


def _slices(arrays: Mapping[str, np.ndarray], inputs: Sequence[ModelInput], index: int) -> Feed:
    return {one.name: _slice(arrays[one.name], one, index) for one in inputs}


def _slice(array: np.ndarray, one: ModelInput, index: int) -> np.ndarray:
    size = _rows(array, one)
    return _batched(array[index * size : (index + 1) * size] if size else array[index], one)


def _rows(array: np.ndarray, one: ModelInput) -> int:
    """Rows of an array over all samples that make one: the input's batch size; 0 where samples have no batch axis."""
    if one.shape is not None and array.ndim == len(one.shape):
        return one.shape[0] or 1
    return 0


def _count(array: np.ndarray, one: ModelInput, path: Path) -> int:
    if array.ndim == 0:
        raise DataError(f"{str(path)!r}: the array for {one.name!r} is a single number; axis 0 counts the samples")
    return len(array) // (_rows(array, one) or 1)


def _batched(array: np.ndarray, one: ModelInput) -> np.ndarray:
    return array[None] if one.shape is not None and array.ndim == len(one.shape) - 1 else array


def _load(path: Path) -> Mapping[str, np.ndarray]:
    """The arrays of a .npz file, or the one of a .npy file under the name ``""``."""
    return ArrayArchive(path) if path.suffix.lower() == ".npz" else {"": load_array(path)}


def _picked(arrays: Mapping[str, np.ndarray], one: ModelInput, inputs: Sequence[ModelInput], path: Path) -> np.ndarray:
    if one.name in arrays:
        return arrays[one.name]
    if len(arrays) == len(inputs) == 1:
        return next(iter(arrays.values()))
    held = ", ".join(map(repr, arrays))
    raise DataError(f"{str(path)!r} holds no array {one.name!r}, which the model needs; it holds {held}")


# ---- images ----------------------------------------------------------------------------------------------------------


def _check_image_input(one: ModelInput, scaling: Scaling) -> None:
    channels = {1, 3} & {one.shape[1], one.shape[3]} if one.shape is not None and len(one.shape) == 4 else set()
    if not channels:
        raise DataError(f"images fit an input [N, 3, H, W] or [N, H, W, 3] (or 1 for grey); the model has {one}")
    pillow()
    count = _channels(one)[1]
    for name, numbers in (("mean", scaling.mean), ("std", scaling.std)):
        if len(numbers) not in (1, count):
            raise DataError(f"{name} has {len(numbers)} numbers: give one, or one for each of the {count} channels")


def _channels(one: ModelInput) -> tuple[bool, int, int | None, int | None]:
    """Of an image input: whether channels come first, how many there are, height and width."""
    shape = one.shape or (None,) * 4
    if shape[1] in (1, 3):
        return True, shape[1] or 0, shape[2], shape[3]
    return False, shape[3] or 0, shape[1], shape[2]


def _image_sample(file: Path, one: ModelInput, scaling: Scaling) -> Feed:
    first, channels, height, width = _channels(one)
    pixels = read_image(file, "L" if channels == 1 else "RGB", (height, width))
    if one.dtype != np.uint8:
        pixels = ((pixels / 255 - np.array(scaling.mean)) / np.array(scaling.std)).astype(one.dtype or np.float32)
    return {one.name: np.ascontiguousarray(pixels.transpose(2, 0, 1) if first else pixels)[None]}
