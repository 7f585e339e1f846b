"""Samples from files: what ``--data`` may name.

    samples.npz          one array per input, named like it; axis 0 counts the samples (other arrays are left alone)
    samples.npy          the same for a model with one input
    folder of *.npz      one file a sample, one array per input
    folder of *.npy      one file a sample, for a model with one input
    folder of folders    one folder per input, named like it; files of one name are one sample
    folder of images     PNG or JPG, resized to the input: value = (pixel / 255 - mean) / std, RGB

An array of one dimension less than the input is a sample without its batch axis. Files are read one at a time, in the
order of their names. Not handled: labels, several images per sample, centre crops (prepare NPY files for those).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from quark.errors import DataError
from quark.onnx.data import Feed, ModelInput

IMAGES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Scaling:
    """How pixels become input values, per channel or one for all."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Samples:
    """Feeds that are read when asked for; iterate as often as needed."""

    readers: Sequence[Callable[[], Feed]]

    def __len__(self) -> int:
        return len(self.readers)

    def __iter__(self) -> Iterator[Feed]:
        return (read() for read in self.readers)

    def first(self, count: int | None) -> Samples:
        """The first ``count`` samples; all of them for None."""
        return Samples(self.readers[:count])


class Reader:
    """``get_next`` over samples, as ONNX Runtime's calibration expects it."""

    def __init__(self, samples: Samples) -> None:
        """Read ``samples`` once."""
        self._feeds = iter(samples)

    def get_next(self) -> Feed | None:
        """The next feed, or None after the last."""
        return next(self._feeds, None)


def find_samples(path: Path, inputs: Sequence[ModelInput], scaling: Scaling | None = None) -> Samples:
    """The samples at ``path`` for a model with these inputs.

    Raises:
        DataError: nothing there that can be read as samples; the message says what would be.
    """
    if path.is_file():
        return _from_file(path, inputs)
    if not path.is_dir():
        raise DataError(f"--data {path} does not exist")
    if all((path / one.name).is_dir() for one in inputs):
        return _from_folders(path, inputs)
    for suffixes, read in ((".npz", _from_npz_files), (".npy", _from_npy_files), (IMAGES, _from_images)):
        if files := sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes):
            return read(files, inputs, scaling or Scaling())
    raise DataError(f"--data {path} holds no .npy, .npz, .png or .jpg file, nor one folder per input: {_names(inputs)}")


def _from_file(path: Path, inputs: Sequence[ModelInput]) -> Samples:
    if path.suffix.lower() not in (".npz", ".npy"):
        raise DataError(f"--data {path}: a folder, a .npz or a .npy file is needed")
    arrays = _load(path)
    chosen = {one.name: _pick(arrays, one, inputs, path) for one in inputs}
    counts = {name: _count(array, one) for (name, array), one in zip(chosen.items(), inputs, strict=True)}
    if len(set(counts.values())) > 1:
        raise DataError(f"{path} holds different numbers of samples: {counts}")
    total = next(iter(counts.values()))
    return Samples([partial(_slices, chosen, tuple(inputs), index) for index in range(total)])


def _from_npz_files(files: Sequence[Path], inputs: Sequence[ModelInput], scaling: Scaling) -> Samples:
    return Samples([partial(_npz_feed, file, tuple(inputs)) for file in files])


def _npz_feed(file: Path, inputs: Sequence[ModelInput]) -> Feed:
    arrays = _load(file)
    return {one.name: _fit(_pick(arrays, one, inputs, file), one) for one in inputs}


def _from_npy_files(files: Sequence[Path], inputs: Sequence[ModelInput], scaling: Scaling) -> Samples:
    only = _only_input(inputs, "a folder of .npy files")
    return Samples([partial(_npy_feed, {only.name: file}, (only,)) for file in files])


def _npy_feed(files: Mapping[str, Path], inputs: Sequence[ModelInput]) -> Feed:
    return {one.name: _fit(next(iter(_load(files[one.name]).values())), one) for one in inputs}


def _from_folders(path: Path, inputs: Sequence[ModelInput]) -> Samples:
    found = {one.name: {file.name: file for file in (path / one.name).glob("*.npy")} for one in inputs}
    names = sorted(set().union(*found.values()))
    for folder, files in found.items():
        if missing := [name for name in names if name not in files]:
            raise DataError(f"--data {path}: the folder {folder} lacks {missing[0]}, which another input's folder has")
    if not names:
        raise DataError(f"--data {path}: the folders {_names(inputs)} hold no .npy file")
    return Samples([partial(_npy_feed, {key: found[key][name] for key in found}, tuple(inputs)) for name in names])


def _from_images(files: Sequence[Path], inputs: Sequence[ModelInput], scaling: Scaling) -> Samples:
    only = _only_input(inputs, "a folder of images")
    shape = only.shape or ()
    if len(shape) != 4 or not {1, 3} & {shape[1], shape[3]}:
        raise DataError(f"images fit an input [N, 3, H, W] or [N, H, W, 3], not {only}")
    return Samples([partial(_image_feed, file, only, shape, scaling) for file in files])


def _image_feed(file: Path, one: ModelInput, shape: tuple[int | None, ...], scaling: Scaling) -> Feed:
    first = shape[1] in (1, 3)
    channels, *size = (shape[1], *shape[2:]) if first else (shape[3], *shape[1:3])
    pixels = _pixels(file, channels == 1, size)
    if one.dtype != np.uint8:
        pixels = ((pixels / 255 - np.array(scaling.mean)) / np.array(scaling.std)).astype(one.dtype)
    return {one.name: np.ascontiguousarray(pixels.transpose(2, 0, 1) if first else pixels)[None]}


def _pixels(file: Path, grey: bool, size: Sequence[int | None]) -> np.ndarray:
    """An image as uint8 ``[height, width, channels]``; a side that ``size`` leaves open stays as it is."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"reading {file.name} needs Pillow: pip install pillow") from error
    try:
        with Image.open(file) as image:
            shown = image.convert("L" if grey else "RGB")
    except OSError as error:
        raise DataError(f"{file} is not a readable image: {error}") from error
    height, width = (side or own for side, own in zip(size, reversed(shown.size), strict=True))
    return np.asarray(shown.resize((width, height), Image.Resampling.BILINEAR)).reshape(height, width, -1)


def _load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, or the one of a .npy file under the name ``""``."""
    try:
        loaded = np.load(path, allow_pickle=False)
        return dict(loaded) if path.suffix.lower() == ".npz" else {"": loaded}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _pick(arrays: Mapping[str, np.ndarray], one: ModelInput, inputs: Sequence[ModelInput], path: Path) -> np.ndarray:
    if one.name in arrays:
        return arrays[one.name]
    if len(arrays) == len(inputs) == 1:
        return next(iter(arrays.values()))
    held = ", ".join(map(repr, arrays)) or "none"
    raise DataError(f"{path} holds no array {one.name!r}, which the model needs; it holds {held}")


def _count(array: np.ndarray, one: ModelInput) -> int:
    if array.ndim == 0:
        raise DataError(f"the array for {one.name} is a single number; axis 0 counts the samples")
    return len(array) // _batch(array, one)


def _batch(array: np.ndarray, one: ModelInput) -> int:
    """Rows of ``array`` that make one feed: the input's fixed batch size where the array has a batch axis, else 1."""
    return (one.shape[0] or 1) if one.shape and array.ndim == len(one.shape) else 1


def _lacks_batch(array: np.ndarray, one: ModelInput) -> bool:
    return one.shape is not None and array.ndim == len(one.shape) - 1


def _slices(arrays: Mapping[str, np.ndarray], inputs: Sequence[ModelInput], index: int) -> Feed:
    return {one.name: _slice(arrays[one.name], one, index) for one in inputs}


def _slice(array: np.ndarray, one: ModelInput, index: int) -> np.ndarray:
    if one.shape is None or array.ndim != len(one.shape):
        return _fit(array[index], one)
    size = _batch(array, one)
    return _fit(array[index * size : (index + 1) * size], one)


def _fit(array: np.ndarray, one: ModelInput) -> np.ndarray:
    """Add a missing batch axis, and store the same kind of number in the input's width (float64 as float32)."""
    array = np.asarray(array)
    array = array[None] if _lacks_batch(array, one) else array
    fits = one.dtype is not None and np.can_cast(array.dtype, one.dtype, "same_kind")
    return array.astype(one.dtype) if fits else array


def _only_input(inputs: Sequence[ModelInput], what: str) -> ModelInput:
    if len(inputs) != 1:
        raise DataError(f"{what} feeds one input, the model has {len(inputs)} ({_names(inputs)}): use .npz files")
    return inputs[0]


def _names(inputs: Sequence[ModelInput]) -> str:
    return ", ".join(one.name for one in inputs)
