"""Shapeshifter under the names of AMD Quark: a ``RunConfig`` of named passes, an ``Engine`` that runs it on a model.

    from quark.shapeshifter import Engine, RunConfig
    changed = Engine(RunConfig(passes={"onnx_fold_batch_norm": {"fold_batch_norm": True}})).run(model)

:func:`quark.onnx.shapeshifter.transform` is the same with reports of what each pass did. Passes are those of
``docs/passes.md``, and your own (:class:`ONNXPass`). Modules of torch are not transformed here.
"""

from __future__ import annotations

from quark.shapeshifter.config import LoadConfigFromFileOrDict, ModelConfig, ONNXModelConfig, RunConfig
from quark.shapeshifter.engine import Engine, shapeshifter
from quark.shapeshifter.own import ONNXPass

__all__ = [
    "Engine",
    "LoadConfigFromFileOrDict",
    "ModelConfig",
    "ONNXModelConfig",
    "ONNXPass",
    "RunConfig",
    "shapeshifter",
]
