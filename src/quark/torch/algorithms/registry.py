"""The algorithms by the class of their configuration, and when each runs.

transform   changes the float model into an equal one that is easier to quantize; before ranges are found
tune        finds better quantized weights, at final scales
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quark.algorithms.names import ROWS, AlgorithmNames
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.ggml import Ggml
from quark.torch.algorithms.autoround import run_autoround
from quark.torch.algorithms.awq import run_awq
from quark.torch.algorithms.bias import float_means, run_bias_correction
from quark.torch.algorithms.cle import run_cle
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.equalization import run_equalization
from quark.torch.algorithms.gptq import run_columns, run_gptq
from quark.torch.algorithms.hqq import run_hqq
from quark.torch.algorithms.reconstruct import run_reconstruction
from quark.torch.algorithms.rotation import run_rotation
from quark.torch.algorithms.smooth import run_autosmooth, run_smooth
from quark.torch.algorithms.svdquant import run_svdquant
from quark.torch.config.algorithms import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    BiasCorrectionConfig,
    ChannelEqualizationConfig,
    CLEConfig,
    GPTAQConfig,
    GPTQConfig,
    HQQConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.matching import Match, Matches
from quark.torch.patterns import matches


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of the torch flow.

    Attributes:
        config: class of its settings.
        run: (context, settings); changes the model through ``context.undo``.
        begin: (context, settings), what has to be known before anything is tuned; ``run`` gets it as third argument.
        linear: works on linear layers only.
    """

    config: type[AlgoConfig]
    run: Callable[..., None]
    begin: Callable[[ModelContext, Any], Any] | None = None
    linear: bool = False

    @property
    def tunes(self) -> bool:
        """Runs at final scales, after the ranges are known; False: transforms the float model."""
        return NAMED.get(self.config.name, OF_USERS).tunes

    @property
    def codes(self) -> bool:
        """Chooses codes under given steps, which types of GGML do not have."""
        return NAMED.get(self.config.name, OF_USERS).codes


NAMED = {row.torch: row for row in ROWS if row.torch}
OF_USERS = AlgorithmNames("", "", tunes=True, codes=True)


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(RotationConfig, run_rotation),
    Algorithm(CLEConfig, run_cle),
    Algorithm(ChannelEqualizationConfig, run_equalization),
    Algorithm(SmoothQuantConfig, run_smooth),
    Algorithm(AutoSmoothQuantConfig, run_autosmooth),
    Algorithm(AWQConfig, run_awq),
    Algorithm(SVDQuantConfig, run_svdquant),
    Algorithm(GPTAQConfig, run_columns, linear=True),
    Algorithm(GPTQConfig, run_gptq, linear=True),
    Algorithm(QronosConfig, run_columns, linear=True),
    Algorithm(AutoRoundConfig, run_autoround, linear=True),
    Algorithm(AdaRoundConfig, run_reconstruction),
    Algorithm(AdaQuantConfig, run_reconstruction),
    Algorithm(HQQConfig, run_hqq),
    Algorithm(BiasCorrectionConfig, run_bias_correction, begin=float_means),
)


def algorithm_of(config: AlgoConfig) -> Algorithm:
    """The row for a configuration.

    Raises:
        ConfigError: there is none.
    """
    if config.own is not None:
        return Algorithm(type(config), run_columns, linear=True)
    for row in ALGORITHMS:
        if type(config) is row.config:
            return row
    known = ", ".join(sorted(row.config.name for row in ALGORITHMS))
    raise ConfigError(f"algo_config: {config.name!r} is not available; those that are: {known}")


def check_order(configs: Sequence[AlgoConfig]) -> None:
    """Everything that transforms the float model comes before what tunes quantized weights.

    Raises:
        ConfigError: an algorithm that is not available, or comes too late.
    """
    tuned = ""
    for config in configs:
        row = algorithm_of(config)
        if config.layers and not row.tunes:
            raise ConfigError(
                f"algo_config: {config.name!r} changes the float model as a whole, so it cannot be for single layers"
            )
        if tuned and not row.tunes:
            raise ConfigError(
                f"algo_config: {config.name!r} changes the float weights, so it must come before {tuned!r}"
            )
        tuned = config.name if row.tunes else tuned


def check_types(found: Matches, configs: Sequence[AlgoConfig]) -> None:
    """What chooses codes has steps to choose them under, and what works on linear layers has some.

    Raises:
        ConfigError: a layer whose type chooses steps and codes together, or no layer that the algorithm can change.
    """
    for config in configs:
        row = algorithm_of(config)
        weights = [item for item in found.quantized if item.stages["weight"] and is_chosen(item, config)]
        for item in weights if row.codes else ():
            kinds = [stage.format for stage in item.stages["weight"] if isinstance(stage.format, Ggml)]
            if kinds:
                raise ConfigError(
                    f"algo_config: {config.name!r} chooses the codes of {item.layer.name!r}, and {kinds[0].kind} "
                    f"chooses them with its scales; leave it out, or use another scheme"
                )
        if row.linear and weights and not any(item.layer.kind.tokens for item in weights):
            raise ConfigError(
                f"algo_config: {config.name!r} rounds weights of linear layers, and is for none here: "
                f"{weights[0].layer.name!r} is a {type(weights[0].layer.module).__name__}; 'adaround' and 'adaquant' "
                "train such layers too"
            )


def is_chosen(item: Match, config: AlgoConfig) -> bool:
    """Whether an algorithm is for a layer."""
    return not config.layers or any(matches(item.layer.names, pattern) for pattern in config.layers)


def run_algorithms(configs: Sequence[AlgoConfig], context: ModelContext, tunes: bool) -> None:
    """Run the algorithms of one of the two times, in order."""
    chosen = [(algorithm_of(config), config) for config in configs]
    steps = [(row, config, for_layers(context, config.layers)) for row, config in chosen if row.tunes == tunes]
    known = [() if row.begin is None else (row.begin(own, config),) for row, config, own in steps]
    for (row, config, own), first in zip(steps, known, strict=True):
        row.run(own, config, *first)


def for_layers(context: ModelContext, patterns: Sequence[str]) -> ModelContext:
    """The context with the layers that ``patterns`` name, or with all.

    Raises:
        ConfigError: a name or glob that matches no quantized layer.
    """
    found = context.found
    for pattern in patterns:
        if not any(matches(item.layer.names, pattern) for item in found.quantized):
            raise ConfigError(f"algo_config: layers: {pattern!r} matches no quantized layer")
    chosen = tuple(layer for layer in found.layers if any(matches(layer.names, pattern) for pattern in patterns))
    return replace(context, found=replace(found, layers=chosen)) if patterns else context
