"""Named arrays in a safetensors file, text among them, in order.

Not in NumPy's formats: Python parses their headers, and that fails in threads on Python 3.11 (cpython issue 106905).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from quark.files.plain import TEXT


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file."""
    from safetensors.numpy import save_file

    text = {name: array.tolist() for name, array in arrays.items() if array.dtype.kind in TEXT}
    order = enumerate(arrays.items())
    numbers = {str(place): np.asarray(array, order="C") for place, (name, array) in order if name not in text}
    save_file(numbers, path, {"names": json.dumps(list(arrays)), "text": json.dumps(text)})


def read_arrays(path: Path, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """What ``write_arrays`` wrote; ``wanted``: those of these names that are there."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as kept:
        about = kept.metadata()
        text = {name: np.array(value, dtype=object) for name, value in json.loads(about["text"]).items()}
        names = [pair for pair in enumerate(json.loads(about["names"])) if wanted is None or pair[1] in wanted]
        return {name: text[name] if name in text else kept.get_tensor(str(place)) for place, name in names}
