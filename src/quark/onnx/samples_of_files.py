"""One sample from one picture, sound or file of the user's own kind, for an input of a model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import DataError
from quark.onnx.audio_files import UnreadableSound, rate_of, read_sound
from quark.onnx.data import Feed, ModelInput, Read
from quark.onnx.image_files import pillow, read_image
from quark.onnx.preprocessing import Preprocessing

_log = logging.getLogger(__name__)


def image_reads(files: Sequence[Path], one: ModelInput, settings: Preprocessing) -> list[Read]:
    """A function per picture; sides that the input and ``settings`` leave open are those of the first one.

    Raises:
        DataError: the input takes no picture, or ``settings`` do not fit it.
    """
    channels = {1, 3} & {one.shape[1], one.shape[3]} if one.shape is not None and len(one.shape) == 4 else set()
    if not channels:
        raise DataError(f"images fit an input [N, 3, H, W] or [N, H, W, 3] (or 1 for grey); the model has {one}")
    pillow()
    _, count, *sides = _layout(one)
    for name, numbers in (("mean", settings.mean), ("std", settings.std)):
        if len(numbers) not in (1, count):
            raise DataError(f"{name} has {len(numbers)} numbers: give one, or one for each of the {count} channels")
    pairs = zip(sides, settings.size or (), strict=False)
    fixed = [(own, wanted) for own, wanted in pairs if own not in (None, wanted)]
    if fixed:
        raise DataError(f"size {list(settings.size or ())} does not fit the input {one}: its sides are {sides}")
    if None in sides and settings.size is None:
        height, width = read_image(files[0], "L").shape[:2]
        settings = replace(settings, size=(sides[0] or height, sides[1] or width))
    return [partial(_image_sample, file, one, settings) for file in files]


def _layout(one: ModelInput) -> tuple[bool, int, int | None, int | None]:
    """Of an image input: whether channels come first, how many there are, height and width."""
    shape = one.shape or (None,) * 4
    if shape[1] in (1, 3):
        return True, shape[1] or 0, shape[2], shape[3]
    return False, shape[3] or 0, shape[1], shape[2]


def _image_sample(file: Path, one: ModelInput, settings: Preprocessing) -> Feed:
    first, channels, *sides = _layout(one)
    height, width = (own or given for own, given in zip(sides, settings.size or sides, strict=True))
    pixels = read_image(file, "L" if channels == 1 else "RGB", (height, width), settings.resize)
    values = pixels[..., ::-1] if settings.bgr and one.dtype == np.uint8 else pixels
    if one.dtype != np.uint8:
        values = settings.values(pixels).astype(one.dtype or np.float32)
    return {one.name: np.ascontiguousarray(values.transpose(2, 0, 1) if first else values)[None]}


def sound_reads(files: Sequence[Path], one: ModelInput) -> list[Read]:
    """A function per file, or per window of a file where the input has a fixed length.

    Raises:
        DataError: the input takes no sound, or a file is shorter than its windows.
    """
    shape = one.shape or ()
    if len(shape) not in (1, 2, 3) or any(side not in (None, 1) for side in shape[:-1]):
        raise DataError(f"sounds fit an input [frames], [1, frames] or [1, 1, frames]; the model has {one}")
    rates = Counter(rate for file in files if (rate := rate_of(file)) is not None)
    if len(rates) > 1:
        told = ", ".join(f"{count} of {rate}" for rate, count in rates.most_common())
        _log.warning("the sounds have several rates (%s), and none is changed: resample them before", told)
    length = shape[-1]
    if length is None:
        return [partial(_sound_sample, file, one, 0, None) for file in files]
    reads: list[Read] = [
        partial(_sound_sample, file, one, index, length) for file in files for index in range(_windows(file, length))
    ]
    if not reads:
        raise DataError(f"no sound has {length} frames, which the input {one} takes; the first is {str(files[0])!r}")
    return reads


def _windows(file: Path, length: int) -> int:
    """How many windows a file has; one for a broken file, which is told when it is read."""
    try:
        return len(read_sound(file)) // length
    except UnreadableSound:
        return 1


def _sound_sample(file: Path, one: ModelInput, index: int, length: int | None) -> Feed:
    frames = read_sound(file)
    part = frames if length is None else frames[index * length : (index + 1) * length]
    shape, dtype = (1,) * (len(one.shape or (1, 1)) - 1), one.dtype or np.dtype(np.float32)
    if dtype.kind == "i":  # PCM as it is
        most = np.iinfo(dtype).max
        part = np.clip(np.round(part.astype(np.float64) * (most + 1)), -most - 1, most)
    return {one.name: part.reshape(*shape, -1).astype(dtype)}


def function_sample(file: Path, inputs: Sequence[ModelInput], function: Callable[[str], Any]) -> Feed:
    """What the user's function makes of a file: a dictionary, or an array for a model with one input.

    Raises:
        DataError: it gives neither.
    """
    found = function(str(file))
    if isinstance(found, Mapping):
        return dict(found)
    if len(inputs) != 1 or not hasattr(found, "__array__"):
        raise DataError(
            f"--preprocess gave {type(found).__name__} for {str(file)!r}; it must give an array, or a dictionary "
            f"{{input name: array}} with {', '.join(one.name for one in inputs)}"
        )
    array, shape = np.asarray(found), inputs[0].shape
    return {inputs[0].name: array[None] if shape is not None and array.ndim == len(shape) - 1 else array}
