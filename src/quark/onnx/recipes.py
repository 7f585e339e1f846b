"""What an expert would try where a quantized model has lost too much: named rows, tried on the model itself.

A ``Choice`` is a configuration as the command line and a configuration file spell it; a ``Recipe`` is one change of it,
the condition under which it could help, and the cause that it mends, in words. ``improve`` tries the rows that apply,
one after the other, and keeps what makes the judged output better, until the model is good or the time is over.

To add a recipe, add a row to ``RECIPES``: cheap and likely ones first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quark.config.presets import PRESETS
from quark.onnx.config_file import config_of
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.tuners import algorithm
from quark.report.verdict import LEVELS, Judged

GOOD = len(LEVELS) - 1


@dataclass(frozen=True)
class Choice:
    """A configuration in the words of the command line.

    Attributes:
        preset: its name.
        options: as ``--set``.
        algorithms: as ``--algorithm``, in order.
        layers: what single layers get, as in a configuration file.
    """

    preset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> QuantizationConfig:
        """The configuration that it stands for.

        Raises:
            ConfigError: an unknown preset or algorithm.
        """
        config = config_of({"preset": self.preset, "layers": dict(self.layers)})
        return with_algorithms(config, self.options, self.algorithms)

    @property
    def name(self) -> str:
        """A few words: those of the command line, and how many layers are left out."""
        kinds = dict.fromkeys(self.layers.values())
        held = [f"{list(self.layers.values()).count(kind)} layers {kind}" for kind in kinds]
        return " ".join((*self.flags()[1:], *(["with", ", ".join(held)] if held else [])))

    def flags(self) -> list[str]:
        """The words of the command line."""
        said = ["--preset", self.preset]
        said += [word for name, value in self.options.items() for word in ("--set", f"{name}={value}")]
        return said + [word for name in self.algorithms for word in ("--algorithm", name)]


@dataclass(frozen=True)
class Situation:
    """What is known of the model and of its first quantization.

    Attributes:
        operators: the operator types of the model.
        proposals: what the engine proposed, in sentences that name options.
        npu: whether the result is made for an NPU compiler.
    """

    operators: frozenset[str]
    proposals: Sequence[str] = ()
    npu: bool = False

    def proposed(self, option: str) -> bool:
        """Whether the engine proposed this option."""
        return any(option in sentence for sentence in self.proposals)


@dataclass(frozen=True)
class Recipe:
    """One change of a configuration.

    Attributes:
        name: its short name.
        cause: what it mends, in words.
        applies: whether it could help, before anything is tried.
        change: the changed configuration.
    """

    name: str
    cause: str
    applies: Callable[[Situation, Choice], bool]
    change: Callable[[Choice], Choice]


def with_algorithms(
    config: QuantizationConfig, options: Mapping[str, Any], algorithms: Sequence[str]
) -> QuantizationConfig:
    """``config``, changed in place: with these options, and these algorithms behind its own."""
    config.extra_options.update(options)
    config.algorithms = [*config.algorithms, *map(algorithm, algorithms)]
    return config


def _option(name: str, value: Any) -> Callable[[Choice], Choice]:
    return lambda choice: replace(choice, options={**choice.options, name: value})


def _algorithm(name: str) -> Callable[[Choice], Choice]:
    def change(choice: Choice) -> Choice:
        there = {type(one) for one in choice.config().algorithms}  # those of the preset, and under whatever name
        return choice if type(algorithm(name)) in there else replace(choice, algorithms=(*choice.algorithms, name))

    return change


def _per_channel(preset: str) -> str:
    return f"{preset}_PER_CHANNEL"


_WIDER = {"A8W8": "A16W8", "S8S8_AAWS": "S16S8_ASWS", "U8S8_AAWS": "U16S8_AAWS"}
_CONVOLUTIONS = frozenset(["Conv", "ConvTranspose"])
_PRODUCTS = frozenset(["MatMul", "Gemm"])

RECIPES = (
    Recipe(
        "float decoding",
        "boxes and scores of the decoding at the end share one scale",
        lambda situation, choice: situation.proposed("FloatDecoding"),
        _option("FloatDecoding", True),
    ),
    Recipe(
        "sigmoid",
        "HardSigmoid in the place of Sigmoid is another function, whatever the precision",
        lambda situation, choice: situation.proposed("ConvertSigmoidToHardSigmoid"),
        _option("ConvertSigmoidToHardSigmoid", False),
    ),
    Recipe(
        "per channel",
        "one scale for a whole weight, whose channels differ",
        lambda situation, choice: _per_channel(choice.preset) in PRESETS,
        lambda choice: replace(choice, preset=_per_channel(choice.preset)),
    ),
    Recipe(
        "channel equalization",
        "channels of very different ranges share the scale of their tensor",
        lambda situation, choice: bool(situation.operators & _CONVOLUTIONS),
        _algorithm("channel_equalization"),
    ),
    Recipe(
        "SmoothQuant",
        "outlier channels in front of MatMul and Gemm",
        lambda situation, choice: bool(situation.operators & _PRODUCTS),
        _algorithm("smooth_quant"),
    ),
    Recipe(
        "calibration search",
        "ranges that are too wide or too narrow for the values that matter",
        lambda situation, choice: True,
        _algorithm("calibration_search"),
    ),
    Recipe(
        "bias correction",
        "channels whose mean moved",
        lambda situation, choice: bool(situation.operators & (_CONVOLUTIONS | _PRODUCTS)),
        _algorithm("bias_correction"),
    ),
    Recipe(
        "16-bit activations",
        "activations that 8 bits are too few for",
        lambda situation, choice: choice.preset.removesuffix("_PER_CHANNEL") in _WIDER and situation.npu,
        lambda choice: replace(choice, preset=_widened(choice.preset)),
    ),
)


def wider(preset: str) -> str | None:
    """The same preset with 16-bit activations; None where there is none."""
    return _widened(preset) if preset.removesuffix("_PER_CHANNEL") in _WIDER else None


def _widened(preset: str) -> str:
    suffix = "_PER_CHANNEL" if preset.endswith("_PER_CHANNEL") else ""
    return f"{_WIDER[preset.removesuffix(suffix)]}{suffix}"


def islands(best: Attempt, ranked: Sequence[str], wide: str) -> Iterator[Choice]:
    """The choice with the layers that lose most, alone, in another precision: one layer, then twice as many, to half.

    Args:
        best: what is not good enough.
        ranked: names of the layers, the one that loses most first.
        wide: what they get: "float", or a preset of more bits.
    """
    count = 1
    while count <= (len(ranked) + 1) // 2:
        yield replace(best.choice, layers=dict.fromkeys(ranked[:count], wide))
        count *= 2


@dataclass(frozen=True)
class Attempt:
    """A configuration that was tried and what came of it; ``causes``: what its recipes mend."""

    choice: Choice
    judged: Judged | None
    causes: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple[int, float, float]:
        """The better, the larger; decibels decide between equal shares of answers."""
        judged = self.judged
        return (-1, 0.0, 0.0) if judged is None else (judged.level, round(judged.value, 2), judged.sqnr)


def improve(
    first: Attempt, situation: Situation, measure: Callable[[Choice], Judged | None], seconds: float
) -> tuple[Attempt, int]:
    """The best attempt found within about ``seconds``, and how many were made besides the first.

    Args:
        first: what was quantized, and how it was judged.
        situation: which recipes apply.
        measure: quantizes a choice and judges it.
        seconds: no attempt begins that would, at the pace of the slowest before, end later.
    """
    best, tried, slowest = first, 0, 0.0
    end = time.perf_counter() + seconds
    for recipe in RECIPES:
        done = best.judged is not None and best.judged.level >= GOOD
        if done or time.perf_counter() + slowest > end:
            break
        if not recipe.applies(situation, best.choice):
            continue
        choice, start = recipe.change(best.choice), time.perf_counter()
        if choice == best.choice:  # it has been told so already
            continue
        attempt = Attempt(choice, measure(choice), (*best.causes, recipe.cause))
        slowest, tried = max(slowest, time.perf_counter() - start), tried + 1
        if attempt.rank > best.rank:
            best = attempt
    return best, tried
