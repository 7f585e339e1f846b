"""Settings of quantization-aware training: how a learned scale starts."""

from __future__ import annotations

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.torch.config.type import TQTThresholdInitMeth, member
from quark.torch.observer import ObserverBase, TQTDivergenceObserver, TQTObserver

STARTS = {TQTThresholdInitMeth._3SD: TQTObserver, TQTThresholdInitMeth._KL_J: TQTDivergenceObserver}


@dataclass(frozen=True)
class QATSpec:
    """Base of the settings of training."""


@dataclass(frozen=True)
class TQTSpec(QATSpec):
    """Trained quantization thresholds, for ``observer_cls=TQTObserver``.

    Attributes:
        threshold_init_meth: where the threshold starts: three standard deviations, or least divergence.
    """

    threshold_init_meth: TQTThresholdInitMeth = TQTThresholdInitMeth._3SD

    def __post_init__(self) -> None:
        found = member(TQTThresholdInitMeth, "threshold_init_meth", self.threshold_init_meth)
        object.__setattr__(self, "threshold_init_meth", found)


def trained_observer(cls: type[ObserverBase], spec: QATSpec | None) -> type[ObserverBase]:
    """The observer that finds where a learned scale starts.

    Raises:
        ConfigError: settings of another method.
    """
    if spec is None:
        return cls
    if not (isinstance(spec, TQTSpec) and issubclass(cls, TQTObserver)):
        raise ConfigError(f"qat_spec={spec!r} belongs to TQTObserver, not to {cls.__name__}")
    return STARTS[spec.threshold_init_meth]
