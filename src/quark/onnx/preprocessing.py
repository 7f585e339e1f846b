"""From a picture's pixels to an input's values, as one value that can be written down and read again.

    value = (pixel / scale - mean) / std        per channel, in the order of the channels that the model gets

``preprocess.yaml`` holds the fields by name. What the numbers suggest is compared with what came out (``doubts``): a
mean of 123.7 belongs to pixels of 0..255, one of 0.485 to pixels of 0..1, and a model that divides by 255 itself wants
the former. Sources: torchvision's and Caffe's conventions; the key ``Image.NominalPixelRange`` of ONNX's metadata.

Not handled: crops by another ratio, colour spaces beside RGB and BGR: a function of the user's own does that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import DataError, check_name, check_names
from quark.ir.surgery import constant_array

RESIZES = ("stretch", "letterbox", "crop")
SCALES = (255.0, 1.0)
NOMINAL = "Image.NominalPixelRange"
_STEPS_THROUGH = ("Cast", "Transpose", "Identity", "QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Preprocessing:
    """How files become samples.

    Attributes:
        mean, std: per channel or one for all, in the unit that ``scale`` leaves.
        scale: 255: pixels become 0..1 before ``mean``; 1: they stay 0..255.
        size: (height, width) for sides that the input leaves open; None: those of the first picture.
        resize: stretch; letterbox (shrink to fit, grey 114 around it); crop (fill, cut off what is too much).
        bgr: channels blue, green, red, as OpenCV and Caffe have them.
        function: a function of the user's own, path of a file → array, in the place of all this.

    Raises:
        DataError: a number that is not finite, a ``std`` that is not above zero, an unknown word.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 255.0
    size: tuple[int, int] | None = None
    resize: str = "stretch"
    bgr: bool = False
    function: Callable[[str], Any] | None = None

    def __post_init__(self) -> None:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            bad = [
                number for number in numbers if not abs(number) <= sys.float_info.max or (name == "std" and number <= 0)
            ]
            if bad or not numbers:
                given = str(bad[0])[:40] if bad else "nothing"
                above = " above zero" if name == "std" else ""
                raise DataError(f"{name} is {given}: every number must be finite{above}")
        check_name("resize", self.resize, RESIZES, DataError)
        if self.scale not in SCALES:
            raise DataError(f"scale is {str(self.scale)[:40]}: 255 makes pixels 0..1, 1 leaves them 0..255")
        sides = (1, 1) if self.size is None else self.size
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise DataError(f"size is {self.size}: it is (height, width), two positive integers")

    def values(self, pixels: np.ndarray) -> np.ndarray:
        """``pixels`` (uint8 ``[height, width, channels]``) as float32 of the same shape."""
        ordered = pixels[..., ::-1] if self.bgr and pixels.shape[-1] == 3 else pixels
        return np.asarray((ordered / self.scale - np.array(self.mean)) / np.array(self.std), np.float32)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, as YAML and JSON hold them; a function by its name."""
        fields = {name: value for name, value in asdict(self).items() if value != getattr(type(self), name)}
        if self.function is not None:
            fields["function"] = getattr(self.function, "__qualname__", repr(self.function))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Preprocessing:
        """What ``to_dict`` wrote, without its function, which is code and not read from files.

        Raises:
            DataError: an unknown field, or a value that it cannot have.
        """
        known = [name for name in cls.__dataclass_fields__ if name != "function"]
        check_names("field of the preprocessing", fields, known, DataError)
        given: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in fields.items()}
        return replace(cls(), **given)


def doubts(model: ir.Model, feed: Mapping[str, np.ndarray], settings: Preprocessing | None) -> list[str]:
    """What looks wrong about a sample, a sentence each with the likely remedy.

    Args:
        model: its first operators and its metadata say which range it wants.
        feed: the sample as it was read, before its types are fitted.
        settings: what made it from a picture; None where it was stored as an array.
    """
    floats = {value.name for value in model.graph.inputs if value.dtype is not None and value.dtype.is_floating_point()}
    pictures = {name: array for name, array in feed.items() if name in floats and array.ndim >= 3 and array.size}
    if settings is not None and (unit := _unit_doubt(settings)):
        return [unit]
    from quark.onnx.first_layer import far_from_trained  # for pictures alone

    found = [
        _layer_doubt(name, far_from_trained(model, name, array), settings)
        or _range_doubt(name, array, wanted_range(model, name), settings)
        for name, array in pictures.items()
    ]
    return [sentence for sentence in found if sentence]


def doubts_of(model: ir.Model, sample: Any, settings: Preprocessing | None) -> list[str]:
    """``doubts`` of what a reader in Python gives: a feed, or the array of a model's one input."""
    names = [str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers]
    given = sample if isinstance(sample, Mapping) else {names[0]: sample} if len(names) == 1 else {}
    feed = {name: np.asarray(array) for name, array in given.items() if hasattr(array, "__array__")}
    pictures = settings if settings is not None and settings.function is None else None
    return [
        re.sub(r"--scale (\d+)", r"Preprocessing(scale=\1)", sentence) for sentence in doubts(model, feed, pictures)
    ]


def _unit_doubt(settings: Preprocessing) -> str:
    largest, spread = max(map(abs, settings.mean)), max(settings.std)
    if settings.scale != 1 and largest > 1.5:
        return f"a mean of {largest:g} is for pixels of 0..255, and they were divided by 255: use --scale 1"
    if settings.scale == 1 and 0 < largest < 1 and spread < 1:
        return f"a mean of {largest:g} is for pixels of 0..1, and they are 0..255: use --scale 255"
    return ""


def _range_doubt(name: str, array: np.ndarray, wanted: float | None, settings: Preprocessing | None) -> str:
    top = float(np.abs(array.astype(np.float32)).max())
    small, large = ("multiply", "divide") if settings is None else ("use --scale 1", "use --scale 255")
    by = " the arrays by 255" if settings is None else ""
    if wanted is not None and wanted > 2 and top <= 1.5:
        return f"the model scales {name!r} from 0..255 itself, and its samples end at {top:.3g}: {small}{by}"
    if wanted is not None and wanted <= 2 and top > 10:
        return f"the model wants {name!r} in 0..1, and its samples reach {top:.4g}: {large}{by}"
    if settings is None and array.dtype == np.uint8 and top > 1 and wanted is None:
        return (
            f"the samples of the float input {name!r} are bytes up to {top:.0f}: if the model wants 0..1, divide them "
            "by 255; if not, store them as float32"
        )
    return ""


def _layer_doubt(name: str, size: str, settings: Preprocessing | None) -> str:
    """``size``: what ``far_from_trained`` found."""
    if not size:
        return ""
    scale = 255.0 if size == "large" else 1.0
    remedy = f"use --scale {scale:g}"
    if settings is None:
        remedy = f"{'divide' if size == 'large' else 'multiply'} the arrays by 255"
    elif settings.scale == scale:
        remedy = "look at mean and std"
    return f"the values of {name!r} are by far too {size} for the model's first layer as it was trained: {remedy}"


def wanted_range(model: ir.Model, name: str) -> float | None:
    """The largest value that an input should have, as metadata or the first operators tell; None where they do not."""
    nominal = model.metadata_props.get(NOMINAL, "")
    if nominal:
        return 255.0 if nominal.endswith(("_0_255", "_16_235")) else 1.0
    value = next((one for one in model.graph.inputs if one.name == name), None)
    while value is not None:
        readers = [use.node for use in value.uses()]
        if len(readers) != 1:
            return None
        node = readers[0]
        if node.op_type not in _STEPS_THROUGH:
            return _scaled_by(node)
        value = node.outputs[0]
    return None


def _scaled_by(node: ir.Node) -> float | None:
    """The range in front of a first Div, Mul or Sub by a constant."""
    array = constant_array(node.inputs[1]) if node.op_type in ("Div", "Mul", "Sub") and len(node.inputs) > 1 else None
    if array is None or not array.size:
        return None
    number = float(np.abs(array.astype(np.float64)).max())
    if node.op_type == "Sub":
        return 255.0 if number > 1.5 else 1.0 if number > 0 else None
    number = 1 / number if node.op_type == "Mul" and number else number
    return 255.0 if number >= 100 else None
