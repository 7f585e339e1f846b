"""What is quantized inside attention modules, beside their layers: the cache, and the probabilities."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from quark.dataclass import dataclass
from quark.torch.config.model import QConfig
from quark.torch.kv_cache import CacheMatch, attach_cache, detach_cache, find_caches
from quark.torch.softmax import attach_softmax, detach_softmax, find_attention
from quark.torch.stage import Stage


@dataclass(frozen=True)
class Targets:
    """The attention modules of a model that get quantizers.

    Attributes:
        caches: whose keys and values are quantized after RoPE.
        modules: (name, module) of those whose probabilities are quantized.
        probabilities: how; None: they are not.
    """

    caches: list[CacheMatch]
    modules: list[tuple[str, nn.Module]]
    probabilities: Stage | None

    @property
    def static(self) -> list[str]:
        """What needs samples."""
        caches = [f"cache of {found.name}" for found in self.caches if any(s.calibrated for s in found.all_stages)]
        if self.probabilities is None or not self.probabilities.calibrated:
            return caches
        return [*caches, *(f"attention probabilities of {name}" for name, _ in self.modules)]

    def attach(self, undo: ExitStack) -> None:
        """Give the modules their quantizers; ``undo`` takes them away again."""
        add: Callable[..., object] = undo.callback
        for found in self.caches:
            add(detach_cache, found, attach_cache(found))
        if self.probabilities is not None:
            for name, module in self.modules:
                add(detach_softmax, module, attach_softmax(name, module, self.probabilities))


def find_targets(model: nn.Module, config: QConfig) -> Targets:
    """The attention modules of ``model`` that ``config`` speaks of, checked; nothing is changed."""
    spec = config.softmax_quant_spec
    modules = find_attention(model) if spec is not None else []
    return Targets(find_caches(model, config), modules, None if spec is None else spec.to_stage())
