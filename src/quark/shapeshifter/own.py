"""Passes of the user's own as classes: ``class RenameAllPass(ONNXPass)`` with ``run(self, model) -> model``.

    class RenameAllPass(ONNXPass):
        def run(self, model):
            model.graph.name = self.config["name"]
            return model

    RenameAllPass.register()                                            # configurations call it rename_all
    Engine({"passes": {"rename_all": {"name": "net"}}}).run(model)

A function over an ``onnx_ir`` graph needs no class: :func:`quark.onnx.passes.registry.register_pass`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quark.errors import ConfigError

if TYPE_CHECKING:
    import onnx


class ONNXPass:
    """The base of a pass that works on a protobuf model.

    Args:
        config: its settings.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})

    def run(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The transformed model; ``model`` may be changed and returned."""
        raise NotImplementedError(f"{type(self).__name__} does not define run")

    @classmethod
    def pass_name(cls) -> str:
        """How configurations name it: ``RenameAllPass`` is ``rename_all``.

        Raises:
            ConfigError: the class is not named ...Pass.
        """
        name = cls.__name__
        if not name.endswith("Pass") or name == "Pass":
            raise ConfigError(f"the class {name!r} has to be named after its pass, as in 'FoldPaddingPass'")
        return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name.removesuffix("Pass")).lower()

    @classmethod
    def register(cls) -> None:
        """Let configurations name the pass, for the rest of the process.

        Raises:
            ConfigError: the name is taken.
        """
        from quark.onnx.passes.registry import add
        from quark.shapeshifter.protobuf import row_of

        add(row_of(cls.pass_name(), lambda model, config: cls(config).run(model), (cls.__doc__ or "").split("\n")[0]))
