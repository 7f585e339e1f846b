"""The algorithms of ``algo_config``: plain frozen values with every field checked by name when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass, replace
from typing import Any, ClassVar, cast

from quark.algorithms.names import ONNX
from quark.algorithms.own import OwnAlgorithm
from quark.config.algorithm import ALIKE, COUNT, NOT_NEGATIVE, Allowed, Bounds, not_one, one_of, read
from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.granularity import Channel, Group
from quark.onnx.quantization.config.algo_base import AlgoConfig
from quark.onnx.quantization.config.finetune import AdaQuantConfig, AdaRoundConfig, AutoRoundConfig
from quark.onnx.quantization.config.mixprecision import AutoMixprecisionConfig

__all__ = [
    "AWQConfig",
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "AutoMixprecisionConfig",
    "AutoRoundConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "CalibrationSearchConfig",
    "ChannelEqualizationConfig",
    "GPTAQConfig",
    "GPTQConfig",
    "QronosConfig",
    "QuarotConfig",
    "SVDQuantConfig",
    "SmoothQuantConfig",
]


@dataclass(frozen=True)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization of neighbouring Conv, ConvTranspose and Gemm layers before anything is quantized.

    Attributes:
        cle_balance_method: "max": channels are compared by their largest magnitude.
        cle_steps: times the whole model is gone through; -1 until nothing changes any more.
        cle_weight_threshold: channels whose largest magnitudes on both sides sum to less stay as they are.
        cle_scale_append_bias: count the bias as one more weight of its channel.
        cle_scale_use_threshold: use ``cle_weight_threshold``.
        cle_total_layer_diff_threshold: with ``cle_steps=-1``, the sum of mean weight changes that counts as nothing.
        keep_worse: stay equalized without a look at the data; False: put the model back where it is worse quantized.
    """

    BOUNDS: ClassVar[Bounds] = {
        "cle_balance_method": one_of("max"),
        "cle_steps": Allowed(
            "a positive integer, or -1: until nothing changes", lambda steps: steps > 0 or steps == -1
        ),
        **ALIKE["cle"],
        "cle_total_layer_diff_threshold": NOT_NEGATIVE,
    }
    name: ClassVar[str] = "cle"
    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-7
    keep_worse: bool = True


#: A calibration method by name, or the percentage that a percentile keeps.
Method = str | float
_KNOWN = ("MinMax", "MinMSE", "Entropy", "LayerwisePercentile")
_SEARCHED: tuple[Method, ...] = ("MinMax", "MinMSE", 99.999, 99.99, 99.9)


@dataclass(frozen=True)
class CalibrationSearchConfig(AlgoConfig):
    """Choose the calibration method of the activations by what the outputs lose, on unlabelled calibration data.

    Attributes:
        methods: candidates besides the method of the configuration: names of ``CalibMethod``, and numbers, which are
            percentages that a percentile keeps.
        data_size: samples used at most; each half gives ranges to be judged by the other.
    """

    BOUNDS: ClassVar[Bounds] = {
        "data_size": COUNT,
        "methods": Allowed(
            f"a list of {', '.join(_KNOWN)}, and percentages from 50 to 100",
            lambda found: (
                len(found) > 0 and all(one in _KNOWN if isinstance(one, str) else 50 <= one <= 100 for one in found)
            ),
        ),
    }
    name: ClassVar[str] = "calibration_search"
    methods: tuple[Method, ...] | list[Method] = _SEARCHED
    data_size: int = 32


@dataclass(frozen=True)
class BiasCorrectionConfig(AlgoConfig):
    """Move the bias of every quantized Conv, ConvTranspose and Gemm so that its channels keep their means.

    Attributes:
        gain: scale the channels of the last Conv and Gemm layers so that deviations from the mean keep their size, too.
        keep_worse: keep the biases even where the model as a whole is worse with them, on calibration data. With
            ``gain`` they stay in any case: it gives up some of the squared error on purpose.
    """

    name: ClassVar[str] = "bias_correction"
    gain: bool = False
    keep_worse: bool = False


@dataclass(frozen=True)
class ChannelEqualizationConfig(AlgoConfig):
    """Scale channels between convolutions so that weights and activations can share one scale per tensor.

    Like ``CLEConfig``, but it measures the activations, and goes through SiLU, Concat and pooling. For power-of-two
    scales, and networks whose channels differ widely.

    Attributes:
        steps: times all chains are gone through.
        through_silu: scale through u · Sigmoid(u) as well, which takes one Mul more per layer.
        widest: largest ratio of two scales of one layer.
        data_size: samples used at most.
        keep_worse: stay equalized even where the quantized model is worse with it, on calibration data.
    """

    BOUNDS: ClassVar[Bounds] = {**ALIKE["channel_equalization"], "data_size": COUNT}
    name: ClassVar[str] = "channel_equalization"
    steps: int = 3
    through_silu: bool = True
    widest: float = 64.0
    data_size: int = 64
    keep_worse: bool = False


@dataclass(frozen=True)
class GPTQConfig(AlgoConfig):
    """GPTQ: round the weights of MatMul and Gemm so that the layers' results on the calibration data stay.

    The configuration's weight spec says what the weights become; of the fields that also say so (``bits``,
    ``group_size``, ``per_channel``, ``mse``, ``weight_symmetric``), those that are not at their default replace that
    part of it.

    Attributes:
        bits: width of a code: 2, 3, 4 or 8.
        block_size: columns between two matrix products; of no influence on the result.
        group_size: elements along the summed axis that share a scale; -1: no groups.
        perc_damp: this part of the mean of the Hessian's diagonal is added to it.
        act_order: begin with the columns of the largest inputs.
        per_channel: a scale for every output channel.
        mse: search the range of least squared error.
        weight_symmetric: no zero points.
        keep_worse: keep the weights even where the model as a whole is worse with them, on calibration data.
        layers: names or ^patterns of the only layers that are rounded so; empty: all. What their weights become, the
            configuration says.
    """

    BOUNDS: ClassVar[Bounds] = {
        "bits": one_of(2, 3, 4, 8),
        **ALIKE["gptq"],
        "perc_damp": NOT_NEGATIVE,
        "group_size": Allowed("a positive integer, or -1: no groups", lambda size: size > 0 or size == -1),
    }
    name: ClassVar[str] = "gptq"
    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True
    keep_worse: bool = False
    layers: tuple[str, ...] | list[str] = ()

    def check(self) -> None:
        """What single layers cannot have of their own."""
        said = self.to_dict().keys() & {"bits", "group_size", "per_channel", "mse", "weight_symmetric"}
        self.need(not (self.layers and said), "layers", f"empty: {', '.join(sorted(said))} would change all weights")

    @property
    def damp_percent(self) -> float:
        """``perc_damp``, as the other algorithms of its kind call it."""
        return self.perc_damp

    @property
    def desc_act(self) -> bool:
        """``act_order``, as the other algorithms of its kind call it."""
        return self.act_order

    def weight_spec(self, spec: TensorSpec) -> TensorSpec:
        """The weight's spec with the fields that are not at their default."""
        symmetric = spec.symmetric and self.weight_symmetric
        changed = self.bits != type(self).bits or not self.weight_symmetric
        format = f"{'int' if symmetric else 'uint'}{self.bits}" if changed else spec.format
        granularity = Channel(-1) if self.per_channel else spec.granularity
        granularity = Group(-1, self.group_size) if self.group_size > 0 else granularity
        method = "mse" if self.mse else spec.method
        return replace(spec, format=format, symmetric=symmetric, granularity=granularity, method=method)


@dataclass(frozen=True)
class GPTAQConfig(AlgoConfig):
    """GPTAQ: GPTQ that makes up for the error of a layer's inputs as well; names and fields of the torch flow.

    The configuration's weight spec says what the weights become.

    Attributes:
        block_size: columns between two matrix products; of no influence on the result.
        damp_percent: this part of the mean of the Hessian's diagonal is added to it.
        desc_act: begin with the columns of the largest inputs.
        static_groups: scales are those of the weights as they were; only True.
        alpha: part of the correction for the inputs' error that is applied.
        keep_worse: keep the weights even where the model as a whole is worse with them, on calibration data.
        layers: names or ^patterns of the only layers that are rounded so; empty: all.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["gptaq"]
    name: ClassVar[str] = "gptaq"
    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    alpha: float = 0.25
    keep_worse: bool = False
    layers: tuple[str, ...] | list[str] = ()


@dataclass(frozen=True)
class QronosConfig(AlgoConfig):
    """Qronos: least-squares correction of the inputs' error, then diffusion of rounding errors; as in the torch flow.

    The configuration's weight spec says what the weights become.

    Attributes:
        block_size: columns between two matrix products; of no influence on the result.
        desc_act: begin with the columns of the largest inputs.
        static_groups: scales are those of the weights as they were; only True.
        alpha: this part of the Hessian's largest eigenvalue is added to its diagonal.
        beta: of the peer's factorization; of no influence here.
        keep_worse: keep the weights even where the model as a whole is worse with them, on calibration data.
        layers: names or ^patterns of the only layers that are rounded so; empty: all.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["qronos"]
    name: ClassVar[str] = "qronos"
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True
    alpha: float = 1e-3
    beta: float = 1e4
    keep_worse: bool = False
    layers: tuple[str, ...] | list[str] = ()


@dataclass(frozen=True)
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant: hand part of the range of what MatMul and Gemm read to their weights, channel by channel.

    Attributes:
        alpha: 0 leaves the activations as wide as they are, 1 takes their whole range into the weights.
        keep_worse: stay smoothed even where the quantized model is worse with it, on calibration data.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["smoothquant"]
    name: ClassVar[str] = "smooth_quant"
    alpha: float = 0.5
    keep_worse: bool = False


@dataclass(frozen=True)
class AWQConfig(AlgoConfig):
    """AWQ: scale up the channels of large activations before weights of MatMul and Gemm are rounded, then clip groups.

    Attributes:
        keep_worse: keep scales and clips even where the quantized model is worse with them, on calibration data.
    """

    name: ClassVar[str] = "awq"
    keep_worse: bool = False


@dataclass(frozen=True)
class QuarotConfig(AlgoConfig):
    """QuaRot: turn what MatMul and Gemm read by an orthogonal matrix, which spreads outlier channels over all.

    Attributes:
        r_matrix_dim: largest size of a block that is turned; channels beyond it are turned in equal blocks.
        use_random_had: random signs before the Hadamard matrix.
        r_config_path: JSON file ``{"R1_pairs": [{"prev_nodes": [..], "next_nodes": [..], "norm_node": name or null}]}``
            of layers that write and read one residual stream, which is then turned in their weights at no cost.
            ``None``: every layer's input is turned by a MatMul in front of it.
        keep_worse: stay turned even where the quantized model is worse with it, on calibration data.
    """

    BOUNDS: ClassVar[Bounds] = {"r_matrix_dim": COUNT}
    name: ClassVar[str] = "quarot"
    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None
    keep_worse: bool = False


@dataclass(frozen=True)
class SVDQuantConfig(AlgoConfig):
    """SVDQuant: a float branch of low rank takes the hard part of each weight of MatMul and Gemm.

    Attributes:
        svd_rank: of the branch.
        smooth_alpha: exponent of the smoothing, where it is not searched.
        search_alpha: the best of ``alpha_candidates`` for every tensor that layers read.
        alpha_candidates: the exponents that are tried; None: 0.05 to 0.95.
        exclude_patterns: layers whose name holds one of these stay without a branch.
        min_layer_size: of the smaller side of a weight.
        keep_worse: keep the branches even where the quantized model is worse with them, on calibration data.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["svdquant"]
    name: ClassVar[str] = "svdquant"
    svd_rank: int = 32
    smooth_alpha: float = 0.5
    search_alpha: bool = True
    alpha_candidates: tuple[float, ...] | list[float] | None = None
    exclude_patterns: tuple[str, ...] | list[str] = ()
    min_layer_size: int = 256
    keep_worse: bool = False


ALGO_NAME_TO_CLASS: dict[str, type[AlgoConfig]] = {
    kind.name: kind
    for kind in (
        *(CLEConfig, ChannelEqualizationConfig, SmoothQuantConfig, AWQConfig, QuarotConfig, SVDQuantConfig),
        *(CalibrationSearchConfig, AutoMixprecisionConfig),
        *(GPTQConfig, GPTAQConfig, QronosConfig),
        *(BiasCorrectionConfig, AdaRoundConfig, AdaQuantConfig, AutoRoundConfig),
    )
}


def config_of_own(row: OwnAlgorithm) -> type[AlgoConfig]:
    """The configuration class of a registered algorithm: its settings, and what all that tune have."""
    settings = [(name, type(default), default) for name, default in row.settings.items()]
    common: list[Any] = [("keep_worse", bool, False), ("layers", list[str], ())]
    doc = f"The algorithm {row.name!r}, which was registered."
    namespace = {"name": row.name, "own": row, "__doc__": doc}
    made = make_dataclass(row.name, [*settings, *common], bases=(AlgoConfig,), namespace=namespace, frozen=True)
    return cast(type[AlgoConfig], made)


def from_dict(data: Mapping[str, Any]) -> AlgoConfig:
    """The configuration that ``to_dict`` wrote; its name may be any that ``quark.algorithms.names`` has for it.

    Raises:
        ConfigError: no such algorithm, or a field that it does not have.
    """
    return read(data, ONNX, ALGO_NAME_TO_CLASS)


def checked(algorithms: Any, field: str = "algo_config") -> tuple[AlgoConfig, ...]:
    """The entries of an ``algo_config`` list.

    Raises:
        ConfigError: an entry that is not an algorithm configuration, or an algorithm that is listed twice.
    """
    if isinstance(algorithms, AlgoConfig) or not isinstance(algorithms, (list, tuple)):
        raise ConfigError(f"{field} is a list of algorithm configurations such as CLEConfig(), not {algorithms!r}")
    for entry in algorithms:
        if not isinstance(entry, AlgoConfig) or not entry.name:
            raise ConfigError(f"{field}: {not_one(entry, ALGO_NAME_TO_CLASS.values())}")
    names = [entry.name for entry in algorithms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{field}: {ALGO_NAME_TO_CLASS[name].__name__} is listed {names.count(name)} times")
    return tuple(algorithms)
