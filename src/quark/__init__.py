"""quark: one toolkit that quantizes PyTorch and ONNX models. Importing it costs nothing; import a flow to work.

ONNX Runtime keeps a device identifier and a database of events in the user's cache, and sends them, from the moment it
is imported. It reads these variables then, and never again; one that is set already stays. Programs that this one
starts inherit them.
"""

import os
from typing import Any

from quark.migration.finder import install

__version__ = "0.13.0"

for _switch in ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED"):  # the name that releases have, and the newer one
    os.environ.setdefault(_switch, "1")


#: What is for both flows, and where it is; imported when it is asked for.
_OF_BOTH = {
    "auto": "quark.automatic",
    "register_algorithm": "quark.extension",
    "register_calibration": "quark.observers.registry",
    "register_format": "quark.numerics.formats",
    "unregister_algorithm": "quark.extension",
    "unregister_calibration": "quark.observers.registry",
    "unregister_format": "quark.numerics.formats",
}

__all__ = list(_OF_BOTH)


def __getattr__(name: str) -> Any:
    if name not in _OF_BOTH:
        raise AttributeError(f"module 'quark' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_OF_BOTH[name]), name)


install()  # imports of names that only AMD Quark has say what to write instead
