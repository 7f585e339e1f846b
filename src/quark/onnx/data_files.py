"""Samples from files, read one at a time in the order of their names.

    samples.npz          one array per input, named like it; axis 0 counts the samples
    samples.npy          the same for a model with one input
    folder of *.npz      one file a sample, one array per input
    folder of *.npy      one file a sample, for a model with one input
    folder of folders    one folder per input, named like it, of .npy files; files of one name are one sample
    folder of images     .png, .jpg, .jpeg, resized to the input (``quark.onnx.preprocessing``)
    folder of sounds     .wav, for [frames], [1, frames] or [1, 1, frames]: a file, or windows of the fixed length
    nested folders       of one of these (ImageNet's folder per class): the folders take turns, so that the first
                         samples are of all classes; it is told where they hold unlike files, or are not read
    list.txt             a path a line, relative to the list; empty lines and those that begin with # are left out

An array with one axis less than the input gets a batch axis. Only names, counts and types are looked at when the reader
is made. Not handled: several images per sample: prepare .npz files for those.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.errors import DataError, check_names
from quark.numerics.array_files import ArrayArchive, load_array
from quark.onnx.audio_files import SOUNDS
from quark.onnx.data import CalibrationDataReader, Feed, ModelInput, Read, inputs_of
from quark.onnx.graph.model import ModelInput as Source
from quark.onnx.graph.model import load
from quark.onnx.image_files import IMAGES
from quark.onnx.preprocess_file import read_beside
from quark.onnx.preprocessing import Preprocessing
from quark.onnx.samples_of_files import function_sample, image_reads, sound_reads
from quark.reading import read_text, regular_file

_log = logging.getLogger(__name__)

ARRAYS = (".npz", ".npy")
LISTS = (".txt", ".lst")


class PathDataReader(CalibrationDataReader):
    """Samples from a folder or an .npz file.

    Args:
        model_input: path or model; its inputs say what is looked for.
        data_path: folder or file, as the module describes.
        input_shape: sizes for the free axes of an image input, per input name.
        mean, std: of images, per channel or one for all, after division by 255.
        preprocessing: everything about images and files; in the place of ``mean`` and ``std``. Without any of them,
            what ``preprocess.yaml`` beside the model's file says.

    Attributes:
        preprocessing: how pictures are read; None where the samples are none.

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
        preprocessing: Preprocessing | None = None,
    ) -> None:
        model = model_input if isinstance(model_input, ir.Model) else load(model_input)
        inputs = [_sized(one, dict(input_shape or {})) for one in inputs_of(model)]
        _check_names(input_shape or {}, inputs)
        self.data_path = Path(data_path)
        settings = preprocessing or Preprocessing(tuple(mean), tuple(std))
        if settings == Preprocessing() and preprocessing is None and isinstance(model_input, (str, Path)):
            settings = read_beside(Path(model_input)) or settings
        for doubt in folder_doubts(self.data_path):
            _log.warning("%s", doubt)
        self._found = partial(find_samples, inputs=inputs, settings=settings)
        self._reads = self._found(Path(data_path))
        self.preprocessing = settings if settings.function is not None or is_picture(Path(data_path)) else None
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

    def separate_reads(self) -> Sequence[Read] | None:
        """A function per file; None for rows of one file, and where a function of the user reads, which others lack."""
        if self.preprocessing is not None and self.preprocessing.function is not None:
            return None
        return None if None in map(file_of, self._reads) else self._found(self.data_path.absolute())


def find_samples(path: Path, inputs: Sequence[ModelInput], settings: Preprocessing | None = None) -> list[Read]:
    """Functions that read one sample each.

    Raises:
        DataError: nothing at ``path`` can be read as samples for these inputs.
    """
    settings = settings or Preprocessing()
    if not path.is_dir():
        regular_file(path, DataError, "the calibration data")
        if path.suffix.lower() not in LISTS:
            return _from_file(path, inputs)
        return _from_files(_listed(path), inputs, settings, f"the list {str(path)!r}")
    if inputs and all(Path(one.name).name == one.name and (path / one.name).is_dir() for one in inputs):
        return _from_folders(path, inputs)
    return _from_files(_inside(path), inputs, settings, f"the folder {str(path)!r}")


def file_of(read: Read) -> Path | None:
    """The file that a sample is read from, or its part of the first input; None for a row of a file of many."""
    given = next(iter(getattr(read, "args", ())), None)
    first = next(iter(given.values()), None) if isinstance(given, Mapping) else given
    return first if isinstance(first, Path) else None


def _from_files(files: Sequence[Path], inputs: Sequence[ModelInput], settings: Preprocessing, where: str) -> list[Read]:
    """A sample a file, or more: of the first kind in ``_KINDS`` that is there."""
    if settings.function is not None and files:
        return [partial(function_sample, file, tuple(inputs), settings.function) for file in files]
    for suffixes, reads in _KINDS.items():
        chosen = [file for file in files if file.suffix.lower() in suffixes]
        if chosen:
            return reads(chosen, inputs, settings)
    names = ", ".join(one.name for one in inputs)
    raise DataError(f"{where} holds no .npy, .npz, .png, .jpg or .wav file, nor one folder per input ({names})")


def is_picture(path: Path) -> bool:
    """Whether samples at ``path`` would be read from pictures."""
    files = _inside(path) if path.is_dir() else _listed(path) if path.suffix.lower() in LISTS else []
    kinds = [kind for kind in _KINDS if any(file.suffix.lower() in kind for file in files)]
    return kinds[:1] == [IMAGES]


def _inside(folder: Path) -> list[Path]:
    """The files of a folder; those of its folders, which take turns, where it has none that hold samples itself."""
    known = set(chain(*_KINDS))
    found = sorted(file for file in folder.iterdir() if file.is_file())
    if any(file.suffix.lower() in known for file in found):
        return found
    groups = [_inside(one) for one in sorted(folder.iterdir()) if one.is_dir() and not one.is_symlink()]
    turns = [file for turn in zip_longest(*groups) for file in turn if file is not None]
    return turns or found


def folder_doubts(path: Path) -> list[str]:
    """What may not be meant of a folder: samples in its folders that are left out, or unlike ones that take turns."""
    known = set(chain(*_KINDS))
    folders = [one for one in sorted(path.iterdir()) if one.is_dir() and not one.is_symlink()] if path.is_dir() else []
    kinds = {one.name: {_kind(file) for file in _inside(one) if file.suffix.lower() in known} for one in folders}
    held = {name: kind for name, kind in kinds.items() if kind}
    if held and any(file.suffix.lower() in known for file in path.iterdir() if file.is_file()):
        return [f"{str(path)!r} holds samples itself: those in its folders ({_few(held)}) are not read"]
    first = next(iter(held.values()), set())
    if all(first & kind for kind in held.values()):
        return []
    said = _few([f"{name}: {' '.join(sorted(kind))}" for name, kind in held.items()])
    return [f"the folders of {str(path)!r} hold unlike files ({said}): give the one that the model is fed from"]


def _kind(file: Path) -> str:
    return file.suffix.lower().replace(".jpeg", ".jpg")


def _few(names: Iterable[str]) -> str:
    named = list(names)
    return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")


def _listed(path: Path) -> list[Path]:
    lines = [line.strip() for line in read_text(path, DataError, "the list").splitlines()]
    found = [path.parent / line for line in lines if line and not line.startswith("#")]
    missing = next((file for file in found if not os.path.isfile(file)), None)  # also where no name can be so long
    if missing is not None or not found:
        what = (
            f"names {str(missing)[:300]!r}, which does not exist (a line is one path)" if missing else "names no file"
        )
        raise DataError(f"the list {str(path)!r} {what}")
    return found


def _npz_reads(files: Sequence[Path], inputs: Sequence[ModelInput], settings: Preprocessing) -> list[Read]:
    return [partial(_npz_sample, file, tuple(inputs)) for file in files]


def _npy_reads(files: Sequence[Path], inputs: Sequence[ModelInput], settings: Preprocessing) -> list[Read]:
    only = _only(inputs, "a folder of .npy files")
    return [partial(_npy_sample, {only.name: file}, (only,)) for file in files]


def _image_reads(files: Sequence[Path], inputs: Sequence[ModelInput], settings: Preprocessing) -> list[Read]:
    return image_reads(files, _only(inputs, "a folder of image files"), settings)


def _sound_reads(files: Sequence[Path], inputs: Sequence[ModelInput], settings: Preprocessing) -> list[Read]:
    return sound_reads(files, _only(inputs, "a folder of .wav files"))


#: Suffixes of a kind of file -> what makes samples of them; the first kind that is there is taken.
_KINDS: dict[tuple[str, ...], Callable[[Sequence[Path], Sequence[ModelInput], Preprocessing], list[Read]]] = {
    (".npz",): _npz_reads,
    (".npy",): _npy_reads,
    IMAGES: _image_reads,
    SOUNDS: _sound_reads,
}


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
    check_names("input in input_shape", given, names, DataError)


def _only(inputs: Sequence[ModelInput], what: str) -> ModelInput:
    if len(inputs) != 1:
        names = ", ".join(one.name for one in inputs)
        raise DataError(
            f"{what} feeds one input; the model has {len(inputs)} ({names}): use .npz files, or a function of a file "
            "that gives a dictionary (--preprocess FILE.py:FUNCTION)"
        )
    return inputs[0]


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _from_file(path: Path, inputs: Sequence[ModelInput]) -> list[Read]:
    if path.suffix.lower() not in ARRAYS:
        raise DataError(
            f"the calibration data {str(path)!r} must be a folder, a .npz or .npy file, or a .txt file that lists files"
        )
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
    row = array[index * size : (index + 1) * size] if size else np.asarray(array[index])  # a number is no array
    return _batched(row, one)


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
