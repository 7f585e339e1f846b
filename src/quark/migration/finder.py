"""Imports of names that AMD Quark has and this package does not: an alias that says so, or an error that helps.

    from quark.onnx.calibration.data_readers import PathDataReader    # works, with a DeprecationWarning
    from quark.torch import save_params                               # ImportError: … write export_safetensors …

One finder at the head of ``sys.meta_path`` looks at ``quark.*`` only. A module that the table knows gets a
``__getattr__`` (PEP 562) behind its own; a module that is not here is either made of such aliases or refused. The
finders of the environment are asked first, so that what exists is always what is imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from quark.errors import QuarkError, nearest
from quark.migration.answers import answer_of, has_aliases, is_above, is_answered, module_row, names_of

PACKAGE = "quark"


def install() -> None:
    """Put the finder in its place, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class MissingNameError(QuarkError, ImportError):
    """A name of AMD Quark that this package does not have; the message says what to write instead."""


class MissingModuleError(QuarkError, ModuleNotFoundError):
    """A module of AMD Quark that this package does not have; the message says what to write instead."""


def find(module: str, name: str, here: ModuleType) -> Any:
    """The object that ``module.name`` of AMD Quark is here, with a ``DeprecationWarning``.

    Raises:
        MissingNameError: there is none.
        AttributeError: AMD Quark has no such name either, or it is a module here, which Python imports then.
    """
    answer = answer_of(module, name, not is_alias(here))
    if answer is None or PathFinder.find_spec(f"{module}.{name}", getattr(here, "__path__", [])) is not None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target = answer.target or home_of(name, answer.homes)
    if not target:
        near = "" if name in names_of(module) else nearest(name, dir(here))
        raise MissingNameError(f"{module}.{name} of AMD Quark is not in this package:{near} {answer.instead}")
    home, _, there = target.rpartition(".")
    text = f"{module}.{name} is a name of AMD Quark; here it is {target}: write 'from {home} import {there}'"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(import_module(home), there)


def home_of(name: str, homes: Sequence[str]) -> str:
    """``module.name`` for the first module that offers the name, or an empty string."""
    for home in homes:
        module = import_module(home)
        if name in getattr(module, "__all__", ()):
            return f"{home}.{name}"
    return ""


def is_alias(module: ModuleType) -> bool:
    """Whether a module is made of aliases only."""
    return isinstance(getattr(module.__spec__, "loader", None), Aliases)


def answering(module: ModuleType, own: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: its own first."""

    def __getattr__(name: str) -> Any:
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                if answer_of(module.__name__, name, True) is None:
                    raise
        return find(module.__name__, name, module)

    return __getattr__


class Answering(Loader):
    """A loader with the table behind it; all else is the loader's that it holds."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module object, as the loader makes it."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then put the table behind it."""
        self.loader.exec_module(module)
        own = module.__dict__.get("__getattr__")
        module.__dict__["__getattr__"] = answering(module, own)
        module.__dict__.setdefault("__path__", [])  # modules of AMD Quark can be below one that is a file here


class Aliases(Loader):
    """Makes a module that has nothing but aliases."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """An ordinary module object."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names."""
        module.__doc__ = "A module of AMD Quark; its names are elsewhere in this package."
        module.__dict__["__getattr__"] = answering(module, None)


class Finder(MetaPathFinder):
    """Answers for modules of AMD Quark."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of a module; None for names that are none of AMD Quark's.

        Raises:
            MissingModuleError: a module that is not here, and none of whose names is.
        """
        if not fullname.startswith(PACKAGE + "."):
            return None
        found = self.elsewhere(fullname, path, target)
        if found is not None:
            if found.loader is not None and is_answered(fullname):
                found.loader = Answering(found.loader)
            return found
        if has_aliases(fullname) or is_above(fullname):
            return ModuleSpec(fullname, Aliases(), is_package=True)
        row = module_row(fullname)
        if row is not None:  # without the argument name, by which ``from package import module`` would swallow it
            raise MissingModuleError(f"{fullname} of AMD Quark is not in this package: {row.instead}")
        return None

    def elsewhere(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """What the other finders find."""
        for finder in sys.meta_path:
            search = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = search(name, path, target) if search and finder is not self else None
            if spec is not None:
                return spec
        return None
