"""The torch flow: ``ModelQuantizer(config).quantize_model(model, dataloader)`` quantizes a PyTorch model in place;
``LLMTemplate`` makes configurations of language models; ``export_safetensors`` writes the quantized model and
``import_model_from_safetensors`` reads it.

All is loaded when it is first asked for, so that importing this module stays cheap, and so that what names, headers
and configurations alone decide (``quark.torch.config``, ``files/headers.py``) is decided before torch is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.config.type import QuantFlow
    from quark.torch.export.api import (
        export_compressed_tensors,
        export_gguf,
        export_onnx,
        export_safetensors,
        import_model_from_safetensors,
    )
    from quark.torch.graph.batch_norm import fold_batch_norm
    from quark.torch.learned import learned_scales
    from quark.torch.quantizer import ModelQuantizer
    from quark.torch.template import LLMTemplate

_EXPORT = "quark.torch.export.api"
_LATE = {  # where the other names are
    "LLMTemplate": "quark.torch.template",
    "ModelQuantizer": "quark.torch.quantizer",
    "QuantFlow": "quark.torch.config.type",
    "fold_batch_norm": "quark.torch.graph.batch_norm",
    "learned_scales": "quark.torch.learned",
}

__all__ = [
    "LLMTemplate",
    "ModelQuantizer",
    "QuantFlow",
    "export_compressed_tensors",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "fold_batch_norm",
    "import_model_from_safetensors",
    "learned_scales",
]


def __getattr__(name: str) -> Any:
    """Import what was left out until it is asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATE.get(name, _EXPORT)), name)
