"""A library that another one imports and hardly ever uses, loaded when it is first used.

``onnx_ir`` imports sympy (470 modules, 0.4 s) for sums and products of symbolic sizes, which the ONNX flow does not
form. ``defer`` puts an empty module in its place that becomes the real one at the first access to any of its
names; ``import sympy.core`` and ``from sympy import Symbol`` are such accesses. A library that is loaded already stays.

``import sympy.core`` asks the empty module for its path, which loads the real one and ``sympy.core`` with it; Python
would then load ``sympy.core`` once more, without its own modules. ``Loaded`` gives it the one that is there.

Python's own ``importlib.util.LazyLoader`` does not serve: a second ``import`` statement reads ``__spec__``, which loads
the module (up to Python 3.12).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_LOCK = threading.RLock()


class Deferred(ModuleType):
    """Stands in ``sys.modules`` for a library that nothing has used yet."""

    def __getattr__(self, name: str) -> Any:
        """A name of the real library, which is loaded now."""
        return getattr(self._loaded(), name)

    def _loaded(self) -> ModuleType:
        with _LOCK:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            return importlib.import_module(self.__name__)


class Loaded:
    """Finds modules of a deferred library that came with it, and hands out what is there instead of a second copy."""

    def __init__(self, library: str) -> None:
        self._inside = f"{library}."

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Where a module is that is loaded already; nothing for all others."""
        there = name.startswith(self._inside) and name in sys.modules
        return ModuleSpec(name, self) if there else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there, which keeps its own specification."""
        module = sys.modules[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def defer(*names: str) -> None:
    """Let libraries, or modules of libraries, be loaded when they are first used.

    Those that are loaded or missing are left alone. Nothing is imported to find out: a module of a package is looked
    for as a file of it.
    """
    for name in names:
        if name not in sys.modules and _exists(name):
            sys.modules[name] = Deferred(name, f"{name}, loaded when it is first used")
            sys.meta_path.insert(0, Loaded(name))


def _exists(name: str) -> bool:
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    inner = rest.replace(".", "/")
    return spec is not None and (not rest or any(Path(place, f"{inner}.py").is_file() for place in places))


class WhenUsed(ModuleType):
    """Stands for a library in one module of ours that is read where the library may never be needed."""

    def __getattr__(self, name: str) -> Any:
        """A name of the library, which is loaded now; kept, since it may be asked for in loops."""
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found


def when_used(name: str) -> Any:
    """A library for the module that asks alone; others see nothing of it, in ``sys.modules`` for one.

    if TYPE_CHECKING:
        import torch
    else:
        torch = when_used("torch")
    """
    return WhenUsed(name)


class Late:
    """A function by the path of its module: ``Late("package").module.function``. Called, or asked what it takes
    (``inspect.unwrap``), it is loaded: a table of many rows, of which few are used, loads no more than these."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Late:
        if name.startswith("_"):
            raise AttributeError(name)
        return Late(f"{self._path}.{name}")

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the function returns."""
        return self.__wrapped__(*given, **named)

    @property
    def __wrapped__(self) -> Any:
        module, _, name = self._path.rpartition(".")
        return getattr(importlib.import_module(module), name)
