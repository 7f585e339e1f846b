"""``JsonExporterConfig``: the entry ``export`` of a ``quantization_config``."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any

from quark.dataclass import dataclass
from quark.errors import check_name
from quark.torch.export.skeleton import FORMATS
from quark.torch.export.storage import PACK_METHODS


@dataclass
class JsonExporterConfig:
    """How the tensors of a checkpoint are stored.

    Attributes:
        weight_format: "real_quantized" (codes) or "fake_quantized" (float values).
        pack_method: order of codes in a word, "reorder" or "order".
        kv_cache_group, min_kv_scale: as in the configuration; scales are merged before they are evaluated.
        weight_merge_groups: kept for files of the peer; it changes nothing.
    """

    weight_format: str = "real_quantized"
    pack_method: str = "reorder"
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    weight_merge_groups: Any = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("weight_format", self.weight_format, FORMATS),
            ("pack_method", self.pack_method, PACK_METHODS),
        ):
            check_name(name, value, allowed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
