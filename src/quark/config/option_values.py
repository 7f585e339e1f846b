"""What a user may write for an option, as the one form that the rest of the code reads.

Scripts for this interface write tuples for lists, paths for texts, ``None`` for "nothing listed", and names of
enumerations with or without their modules.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from quark.config.typed import Before
from quark.errors import nearest

_log = logging.getLogger(__name__)
#: Bins of an octave that the histograms of ``quark.observers`` may have.
BINS = (16, 1 << 16)
_MODES = ("All", "HistCenter", "Percentile")


def plain(value: Any) -> Any:
    """Tuples as lists, paths as texts, NumPy's numbers as Python's, also inside lists and dictionaries."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def _nothing_listed(value: Any) -> Any:
    return [] if value is None else value


def _off(value: Any) -> Any:
    return False if value is None else value


def _search_name(value: Any) -> Any:
    """``MinMSE`` of a member of an enumeration, or of its text, ``quark.onnx.ExtendedCalibrationMethod.MinMSE``."""
    if not isinstance(value, str):
        return getattr(value, "name", value)
    *package, last = value.split(".")
    known = ("CalibrationMethod", "ExtendedCalibrationMethod", "CalibMethod")
    return last if not package or (package[-1] in known and package[:-1] in ([], ["quark", "onnx"])) else value


def _float_mode(value: Any) -> Any:
    """A mode; for any other text the one that the interface falls back to, and a word about it."""
    if not isinstance(value, str) or value in _MODES:
        return value
    _log.warning(
        "MinMSEModeFloatScale has no mode %r (there are %s), so it is Percentile.%s",
        *(value, ", ".join(_MODES), nearest(value, _MODES)),
    )
    return "Percentile"


def _bins(value: Any) -> Any:
    """A number of bins that histograms can have; a finer one answers for a coarser one."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return value
    used = min(max(value, BINS[0]), BINS[1])
    if used != value:
        _log.warning("NumBins=%d: histograms have %d to %d bins in every octave, so it is %d", value, *BINS, used)
    return used


#: A list of names; ``None`` is the empty one.
Names = Annotated[list[str], Before(_nothing_listed)]
MaybeNone = Before(_nothing_listed)
#: True or False; ``None`` is False.
Switch = Annotated[bool, Before(_off)]
SearchName, FloatMode, Bins = (Before(made) for made in (_search_name, _float_mode, _bins))
