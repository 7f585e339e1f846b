"""Labels of samples from files: classes, boxes of a COCO-style JSON file, masks. Matched by file name, or by order."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from quark.dataclass import dataclass
from quark.errors import DataError, nearest
from quark.files.identity import digest_of_file
from quark.files.schema import OpenSchema, checked
from quark.measure.labelled import IGNORED
from quark.numerics.array_files import load_array
from quark.onnx.image_files import read_mask
from quark.onnx.preprocessing import Preprocessing
from quark.reading import read_json, read_text

MOST_DIGITS = 9


@dataclass(frozen=True)
class LabelSource:
    """What was given.

    Attributes:
        model: the float model's file.
        labels: a file or folder; None: none was given.
        files: the file of every sample; None for samples that are rows of one file.
        settings: what was done with pictures.
    """

    model: Path
    labels: Path | None
    files: Sequence[Path | None]
    settings: Preprocessing = field(default_factory=Preprocessing)

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(self.files)

    def folders(self) -> list[str]:
        """Names of the folders that the samples lie in, sorted."""
        return sorted({file.parent.name for file in self.files if file is not None})

    def by_name(self, found: Mapping[str, Any], what: str) -> list[Any]:
        """The entry of every sample by its file's name, path or stem; in their order where samples have no files.

        Raises:
            DataError: a sample without an entry, or another number of entries.
        """
        if None in self.files:
            if len(found) != self.count:
                raise DataError(f"{self.said} has {len(found)} {what} for {self.count} samples")
            return list(found.values())
        chosen = []
        for file in (one for one in self.files if one is not None):
            keys = (f"{file.parent.name}/{file.name}", file.name, file.stem)
            key = next((one for one in keys if one in found), None)
            if key is None:
                near = nearest(file.name, found)
                raise DataError(f"{self.said} has no {what} for the sample {file.name!r}.{near}")
            chosen.append(found[key])
        return chosen

    @property
    def said(self) -> str:
        """The option and its value, for messages."""
        return f"--labels {str(self.labels)!r}"

    def seen(self, label: Boxes, sides: tuple[int, int], relative: bool) -> np.ndarray:
        """Boxes [m, 6] of a picture (corners, class, crowd) in the coordinates of the model's input.

        Args:
            label: of the picture.
            sides: (height, width) of the input.
            relative: whether the model gives parts of the picture instead of pixels.
        """
        moved = np.array(label.rows, np.float64).reshape(-1, 6)
        for axis, wanted in enumerate((sides[1], sides[0])):
            factor, offset = _moved(label.size, (sides[1], sides[0]), axis, self.settings.resize)
            moved[:, [axis, axis + 2]] = moved[:, [axis, axis + 2]] * factor + offset
            moved[:, [axis, axis + 2]] = moved[:, [axis, axis + 2]].clip(0, wanted)
            moved[:, [axis, axis + 2]] /= wanted if relative else 1
        return moved


def _moved(size: tuple[int, int], wanted: tuple[int, int], axis: int, resize: str) -> tuple[float, float]:
    """Factor and offset of one axis, as ``image_files`` fits pictures."""
    if resize == "stretch":
        return wanted[axis] / size[axis], 0.0
    choose = min if resize == "letterbox" else max
    factor = choose(side / own for side, own in zip(wanted, size, strict=True))
    return factor, (wanted[axis] - round(size[axis] * factor)) // 2


def digest_of(labels: Path | None) -> str:
    """What tells two files, or folders of them, apart."""
    if labels is None:
        return "none"
    files = sorted(one for one in labels.rglob("*") if one.is_file()) if labels.is_dir() else [labels]
    whole = hashlib.blake2b(digest_size=8)
    for file in files:
        whole.update(f"{file.name} {digest_of_file(file)}".encode())
    return whole.hexdigest()


# ---- classes ---------------------------------------------------------------------------------------------------------


def classes_of(given: LabelSource) -> list[int]:
    """The class of every sample: from a file, or from the folders, whose sorted names are the classes from 0 on.

    Raises:
        DataError: no such file, another number of labels, or something that is not a class.
    """
    path = given.labels
    if path is None:
        return _by_folder(given)
    if path.is_dir():
        raise DataError(
            f"{given.said} is a folder: give a file, or leave it out where every class has a folder of samples"
        )
    if path.suffix.lower() == ".csv":
        return _by_table(path, given)
    if path.suffix.lower() == ".npy":
        found = [str(one) for one in np.asarray(load_array(path)).ravel().tolist()]
    else:
        found = [line.strip() for line in read_text(path, DataError, "--labels").splitlines() if line.strip()]
    return [_class(one, given) for one in found]


def _class(text: str, given: LabelSource) -> int:
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise DataError(f"{given.said}: {text[:40]!r} is not a class; write one number from 0 on for each sample")
    return int(text)


def _by_folder(given: LabelSource) -> list[int]:
    if None in given.files:
        raise DataError("the samples are rows of one file, so no folder names their classes: give --labels")
    names = given.folders()
    if len(names) < 2:
        raise DataError(f"all samples lie in the folder {names[0]!r}: give --labels, or one folder for each class")
    number = {name: int(name) for name in names} if all(one.isdecimal() for one in names) else None
    places = number or {name: place for place, name in enumerate(names)}
    return [places[file.parent.name] for file in given.files if file is not None]


def _by_table(path: Path, given: LabelSource) -> list[int]:
    """One column of classes in the order of the samples, or the file and its class; a first row of words is a head."""
    lines = read_text(path, DataError, "--labels").splitlines()
    try:
        rows = [row for row in csv.reader(lines) if any(map(str.strip, row))]
    except csv.Error as error:
        raise DataError(f"{given.said} is not a table: {error}") from error
    if rows and not rows[0][-1].strip().isdecimal():
        rows = rows[1:]
    widths = {len(row) for row in rows}
    if not rows or len(widths) != 1 or not widths <= {1, 2}:
        raise DataError(f"{given.said}: every row must be a class, or a file and its class")
    if widths == {1}:
        return [_class(row[0].strip(), given) for row in rows]
    table: dict[str, int] = {}
    for name, text in ((row[0].strip(), row[1].strip()) for row in rows):
        kind = _class(text, given)
        if table.setdefault(name, kind) != kind:
            raise DataError(f"{given.said} gives {name!r} the classes {table[name]} and {kind}")
    return [int(one) for one in given.by_name(table, "class")]


# ---- boxes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boxes:
    """The truth of one picture: its (width, height), and rows of x1 y1 x2 y2 class crowd in its pixels."""

    size: tuple[int, int]
    rows: tuple[tuple[float, ...], ...] = ()


class _Image(OpenSchema):
    id: int
    file_name: str = ""
    width: int = Field(gt=0, lt=2**31)
    height: int = Field(gt=0, lt=2**31)


class _Annotation(OpenSchema):
    image_id: int
    category_id: int
    bbox: list[Annotated[float, Field(allow_inf_nan=False)]]
    iscrowd: int = 0


class _Category(OpenSchema):
    id: int


class _Coco(OpenSchema):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = Field(default_factory=list)


def boxes_of(given: LabelSource) -> list[Boxes]:
    """The boxes of every sample; class k is the k-th category by id.

    Raises:
        DataError: no COCO-style file, a box that is none, or a picture that it does not name.
    """
    path = Path(str(given.labels))
    if given.settings.function is not None:
        raise DataError("--metric map50: where --preprocess puts pixels is not known: give --metric FILE.py:FUNCTION")

    def refuse(why: str) -> DataError:
        return DataError(f"{given.said}: {why}")

    told = checked(read_json(path, DataError, "--labels"), _Coco, refuse)
    ids = sorted({one.id for one in told.categories} or {one.category_id for one in told.annotations})
    place = {kind: k for k, kind in enumerate(ids)}
    rows: dict[int, list[tuple[float, ...]]] = {one.id: [] for one in told.images}
    for one in told.annotations:
        if one.image_id not in rows:
            raise refuse(f"an annotation is of image {one.image_id}, which is not among the images")
        if len(one.bbox) != 4 or one.category_id not in place or min(one.bbox[2:]) < 0:
            raise refuse(f"an annotation of image {one.image_id} has the box {one.bbox} and category {one.category_id}")
        x, y, width, height = map(float, one.bbox)
        box = (x, y, x + width, y + height, float(place[one.category_id]), float(one.iscrowd))
        rows[one.image_id].append(box)
    found = {one.file_name or str(one.id): Boxes((one.width, one.height), tuple(rows[one.id])) for one in told.images}
    return given.by_name({Path(name).name: boxes for name, boxes in found.items()}, "boxes")


# ---- masks -----------------------------------------------------------------------------------------------------------


def masks_of(given: LabelSource) -> list[Path | np.ndarray]:
    """The mask of every sample: a file, or an array [height, width].

    Raises:
        DataError: neither a folder of .png files nor an .npy file, or a sample without a mask.
    """
    path = Path(str(given.labels))
    if path.is_dir():
        if None in given.files:
            raise DataError(f"{given.said} is a folder, and the samples are rows of one file: give an .npy file")
        return given.by_name({file.stem: file for file in sorted(path.rglob("*.png"))}, "mask")
    if path.suffix.lower() != ".npy":
        raise DataError(f"{given.said}: masks are a folder of .png files, or an .npy file [samples, height, width]")
    array = np.asarray(load_array(path))
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise DataError(f"{given.said} has the shape {list(array.shape)} of {array.dtype}; masks are whole numbers "
                        "[samples, height, width]")  # fmt: skip
    return list(array)


def mask_of(label: Path | np.ndarray, sides: tuple[int, ...], settings: Preprocessing) -> np.ndarray:
    """A mask [height, width] as the model sees its picture; 255 counts for nothing.

    Raises:
        DataError: an array of another size.
    """
    if isinstance(label, Path):
        return read_mask(label, (sides[0], sides[1]), settings.resize, IGNORED)
    if label.shape != tuple(sides):
        raise DataError(f"--labels: a mask has the shape {list(label.shape)}, and the model's output {list(sides)}")
    return label
