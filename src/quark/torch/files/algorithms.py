"""Which algorithms work on a model that stays in its files, and when: the list of a configuration in three stages.

change   scalings, rotations        the float model, block by block (``changed.py``)
tune     one that tunes block by block                              (``tuned.py``)
refine   HQQ: each weight by itself, when its file is written       (``quantize.py``)
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.torch.algorithms.registry import algorithm_of, check_order
from quark.torch.config.algorithms import AlgoConfig, HQQConfig, SVDQuantConfig
from quark.torch.config.model import QConfig
from quark.torch.matching import weights_in_groups


@dataclass(frozen=True)
class Stages:
    """The algorithms of a job.

    Attributes:
        change: those that transform the float model, in order.
        tune: the one that tunes block by block, or None.
        refine: HQQ, or None.
    """

    change: tuple[AlgoConfig, ...]
    tune: AlgoConfig | None
    refine: HQQConfig | None


def stages_of(config: QConfig, plan: Plan, static: bool, samples: Iterable[Any] | None) -> Stages:
    """The stages of a configuration.

    Raises:
        ConfigError: an algorithm that cannot work on files, two that tune, or weights that share a scale.
        DataError: no samples.
    """
    every = list(config.algo_config or [])
    check_order(every)
    late = [algorithm for algorithm in every if algorithm_of(algorithm).tunes]
    early = tuple(algorithm for algorithm in every if algorithm not in late)
    for algorithm in every:
        if isinstance(algorithm, SVDQuantConfig):
            raise ConfigError(
                f"algo_config: {algorithm.name!r} puts modules beside the layers, which files cannot get one by one; "
                f"quantize_model does it, in memory"
            )
    if len(late) > 1:
        names = ", ".join(algorithm.name for algorithm in late)
        raise ConfigError(f"algo_config: one algorithm that tunes works on files, not {names}")
    if every and static:
        raise ConfigError("algo_config: in files, algorithms need dynamic or no activations, not static ones")
    shared = list(weights_in_groups(plan))
    if every and shared:
        raise ConfigError(
            f"algo_config: {shared[0]!r} shares its scale with other weights, which algorithms in files cannot have"
        )
    needing = [algorithm for algorithm in every if not isinstance(algorithm, HQQConfig)]
    if needing and samples is None:
        raise DataError(f"algo_config: {needing[0].name!r} needs samples: give a dataloader")
    last = late[0] if late else None
    return Stages(early, None if isinstance(last, HQQConfig) else last, last if isinstance(last, HQQConfig) else None)


def refined(refine: HQQConfig | None, name: str) -> bool:
    """Whether HQQ is for the weight called ``name``."""
    layer = name.rpartition(".")[0]
    return refine is not None and (not refine.layers or any(fnmatchcase(layer, part) for part in refine.layers))
