"""What an expert would try where a quantized model has lost too much: named rows, tried on the model itself.

A ``Choice`` is a configuration as the command line and a configuration file spell it; a ``Recipe`` is one change of it,
the condition under which it could help, and the cause that it mends, in words. ``quark.onnx.climb`` tries those that
apply.

To add a recipe, add a row to ``RECIPES``: cheap and likely ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from quark.config.presets import PRESETS, get_preset
from quark.dataclass import dataclass
from quark.numerics.formats import Int, get_format
from quark.onnx.config_file import config_of
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx.quantization.config.tuners import algorithm, preset_tuners

LIBRARIES = "UserCustomOpLibPath"
"""The option that belongs to the model, not to a choice: it is in no name."""


@dataclass(frozen=True)
class Choice:
    """A configuration in the words of the command line.

    Attributes:
        preset: its name.
        options: as ``--set``.
        algorithms: as ``--algorithm``, in order.
        layers: what single layers get, as in a configuration file.
        exclude: nodes that stay in float, as there; they belong to the model and are in no name.
    """

    preset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()

    def config(self) -> QuantizationConfig:
        """The configuration that it stands for.

        Raises:
            ConfigError: an unknown preset or algorithm.
        """
        config = config_of({"preset": self.preset, "layers": dict(self.layers), "exclude": list(self.exclude)})
        return with_algorithms(config, self.options, self.algorithms)

    @property
    def name(self) -> str:
        """A few words: those of the command line, and how many layers are left out."""
        kinds = dict.fromkeys(self.layers.values())
        held = [f"{list(self.layers.values()).count(kind)} layers {kind}" for kind in kinds]
        short = {name: f"{len(one)} nodes" if isinstance(one, list) else one for name, one in self.options.items()}
        short.pop(LIBRARIES, None)
        return " ".join((*replace(self, options=short).flags()[1:], *(["with", ", ".join(held)] if held else [])))

    @property
    def pace(self) -> str:
        """The same for choices that take about as long."""
        timed = ("timed",) if self.options.get("TuneSpeed") else ()
        return " ".join(("trial", *timed, *self.algorithms))

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
        slow: the quantized model was timed, and is no faster than the float model.
        lost: hardly anything was left of what the float model computes.
        apart: presets of more bits are trials of their own: a recipe is for less than all layers.
    """

    operators: frozenset[str]
    proposals: Sequence[str] = ()
    npu: bool = False
    slow: bool = False
    lost: bool = False
    apart: bool = False

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
        first: the engine itself proposed it: tried before anything is compared.
        slow: takes many times as long as a quantization: tried after all others.
        times: how many times as long as a quantization it takes, about: on SqueezeNet, 16 samples.
        last: costs more than all others, and is the likeliest to help: time is kept for it while a model is lost.
    """

    name: str
    cause: str
    applies: Callable[[Situation, Choice], bool]
    change: Callable[[Choice], Choice]
    first: bool = False
    slow: bool = False
    times: float = 1.0
    last: bool = False


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


def _mode(choice: Choice) -> str:
    return Config(global_quant_config=choice.config()).compile().mode


def _static(choice: Choice) -> bool:
    return _mode(choice) == "static"


def _ranged(choice: Choice) -> bool:
    """Whether activations get ranges from samples."""
    return _static(choice) and get_preset(choice.preset).activation.ranged


def _weights_tuned(situation: Situation, choice: Choice) -> bool:
    """Whether there are weights whose rounding can be tuned: scales known beforehand."""
    return bool(situation.operators & (_CONVOLUTIONS | _PRODUCTS)) and _static(choice)


def _whole(choice: Choice) -> bool:
    """Whether weights become integers."""
    return isinstance(get_format(get_preset(choice.preset).weight.format), Int)


def _tuner(text: str) -> Callable[[Choice], Choice]:
    """The algorithm that rounds the weights, instead of another one that does."""

    def change(choice: Choice) -> Choice:
        kept = tuple(name for name in choice.algorithms if name.partition(":")[0] not in preset_tuners())
        return _algorithm(text)(replace(choice, algorithms=kept))

    return change


def _gain(choice: Choice) -> Choice:
    """Bias correction that also corrects the gain of channels; instead of the plain one."""
    kept = tuple(name for name in choice.algorithms if not name.startswith("bias_correction"))
    return replace(choice, algorithms=(*kept, "bias_correction:gain=true"))


def _takes_channels(situation: Situation, choice: Choice) -> bool:
    """NPU compilers take one power of two for a whole weight."""
    return not (situation.npu and choice.preset.startswith("XINT8"))


def _shares_in_concat(choice: Choice) -> bool:
    """Whether the inputs of a Concat get one scale that is no rule of the device's arithmetic."""
    job = Config(global_quant_config=choice.config()).compile()
    return job.mode == "static" and not job.npu and bool(job.options.AlignConcat and job.options.NPULimitationCheck)


def _per_channel(preset: str) -> str:
    return f"{preset}_PER_CHANNEL"


_WIDER = {"A8W8": "A16W8", "S8S8_AAWS": "S16S8_ASWS", "U8S8_AAWS": "U16S8_AAWS"}
_CONVOLUTIONS = frozenset(["Conv", "ConvTranspose"])
_PRODUCTS = frozenset(["MatMul", "Gemm"])

QUICKER = Recipe(
    "own timings",
    "integers where float is faster on this machine",
    lambda situation, choice: situation.slow and _static(choice) and "TunedFloat" not in choice.options,
    _option("TuneSpeed", True),
    times=4.0,
)
"""For speed, which no other row is for: tried on a preset that is no faster than float, before the others."""

RECIPES = (
    QUICKER,
    Recipe(
        "float decoding",
        "boxes and scores of the decoding at the end share one scale",
        lambda situation, choice: situation.proposed("FloatDecoding") and _static(choice),
        _option("FloatDecoding", True),
        first=True,
    ),
    Recipe(
        "sigmoid",
        "HardSigmoid instead of Sigmoid is another function, whatever the precision",
        lambda situation, choice: situation.proposed("ConvertSigmoidToHardSigmoid") and _static(choice),
        _option("ConvertSigmoidToHardSigmoid", False),
        first=True,
    ),
    Recipe(
        "float outputs",
        "too few codes for the last result: values that are hardly told apart share one scale",
        lambda situation, choice: situation.npu and _ranged(choice),
        _option("FloatOutputs", True),
    ),
    Recipe(
        "measured Softmax",
        "parts of an attention over many places that are smaller than a code of the scale from 0 to 1",
        lambda situation, choice: "Softmax" in situation.operators and _ranged(choice),
        _option("MeasureSoftmax", True),
    ),
    Recipe(
        "float32 scales",
        "scales that are powers of two are up to twice as coarse as the range asks for",
        lambda situation, choice: situation.lost and choice.preset.startswith("XINT8"),
        lambda choice: replace(choice, preset=_float_scales(choice.preset)),
    ),
    Recipe(
        "own scales in Concat",
        "tensors of unlike ranges share one scale because a Concat joins them",
        lambda situation, choice: "Concat" in situation.operators and _shares_in_concat(choice),
        _option("AlignConcat", False),
    ),
    Recipe(
        "per channel",
        "one scale for a whole weight, whose channels differ",
        lambda situation, choice: _per_channel(choice.preset) in PRESETS and _takes_channels(situation, choice),
        lambda choice: replace(choice, preset=_per_channel(choice.preset)),
    ),
    Recipe(
        "channel equalization",
        "channels of very different ranges share the scale of their tensor",
        lambda situation, choice: bool(situation.operators & _CONVOLUTIONS),
        _algorithm("channel_equalization"),
        times=10.0,
    ),
    Recipe(
        "32-bit biases",
        "biases in 8 bits are too coarse for what they are added to",
        lambda situation, choice: choice.preset.startswith("XINT8") and bool(situation.operators & _CONVOLUTIONS),
        _option("Int32Bias", True),
    ),
    Recipe(
        "cross-layer equalization",
        "two layers in a row of which one has all the range",
        lambda situation, choice: "Conv" in situation.operators,
        _algorithm("cle:keep_worse=false"),
        times=10.0,
    ),
    Recipe(
        "SmoothQuant",
        "outlier channels in front of MatMul and Gemm",
        lambda situation, choice: bool(situation.operators & _PRODUCTS),
        _algorithm("smooth_quant"),
        times=3.0,
    ),
    Recipe(
        "calibration search",
        "ranges that are too wide or too narrow for the values that matter",
        lambda situation, choice: _ranged(choice),
        _algorithm("calibration_search"),
        times=12.0,
    ),
    Recipe(
        "bias correction",
        "channels whose mean moved",
        lambda situation, choice: bool(situation.operators & (_CONVOLUTIONS | _PRODUCTS)) and _static(choice),
        _algorithm("bias_correction"),
        times=6.0,
    ),
    Recipe(
        "bias correction with gain",
        "channels whose mean and whose strength moved",
        lambda situation, choice: bool(situation.operators & _CONVOLUTIONS) and _static(choice),
        _gain,
        times=6.0,
    ),
    Recipe(
        "AWQ",
        "weights of few bits that meet large activations",
        lambda situation, choice: bool(situation.operators & _PRODUCTS) and _mode(choice) == "nbits",
        _algorithm("awq"),
        times=4.0,
    ),
    Recipe(
        "GPTQ",
        "rounding errors of weights that the weights not yet rounded can take over",
        lambda situation, choice: bool(situation.operators & _PRODUCTS) and _static(choice),
        _tuner("gptq"),
        times=4.0,
    ),
    Recipe(
        "AdaRound",
        "rounding weights to the nearest code is not the best rounding",
        lambda situation, choice: _weights_tuned(situation, choice) and _whole(choice),
        _tuner("adaround:num_iterations=100"),
        slow=True,
        times=20.0,
    ),
    Recipe(
        "AdaQuant",
        "weights whose codes and scales are better found together, on the outputs of their layer",
        _weights_tuned,
        _tuner("adaquant:num_iterations=100,learning_rate=0.001"),
        slow=True,
        times=20.0,
    ),
    Recipe(
        "16-bit activations",
        "activations that 8 bits are too few for",
        lambda situation, choice: situation.npu and not situation.apart and _takes_more_bits(situation, choice.preset),
        lambda choice: replace(choice, preset=_widened(_float_scales(choice.preset))),
        last=True,
    ),
)


def wider(preset: str) -> str | None:
    """The same preset with 16-bit activations; None where there is none."""
    return _widened(preset) if preset.removesuffix("_PER_CHANNEL") in _WIDER else None


def _widened(preset: str) -> str:
    suffix = "_PER_CHANNEL" if preset.endswith("_PER_CHANNEL") else ""
    return f"{_WIDER[preset.removesuffix(suffix)]}{suffix}"


def _float_scales(preset: str) -> str:
    """The same preset with float32 scales in the place of powers of two."""
    return preset.replace("XINT8", "A8W8", 1)


def _takes_more_bits(situation: Situation, preset: str) -> bool:
    """Whether there is one of more bits; powers of two, another compiler's, are given up for a model that is lost."""
    return wider(_float_scales(preset) if situation.lost else preset) is not None
