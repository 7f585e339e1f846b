"""The algorithms of ``QConfig.algo_config``: one class each, with the fields and names of the dialect.

``scaling_layers``, ``inside_layer_modules`` and ``model_decoder_layers`` say where things are in a model; left empty,
they are found from the modules. Values that no algorithm can use are refused when a configuration is made.
"""

from __future__ import annotations

from dataclasses import asdict, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from quark.algorithms.own import OWN
from quark.config.algorithm import ALIKE, COUNT, NOT_NEGATIVE, POSITIVE, RATIO, Bounds, one_of
from quark.config.known_fields import KnownFields
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.reading import read_json
from quark.torch.config.algo_base import AlgoConfig


@dataclass
class GPTQConfig(AlgoConfig):
    """GPTQ: columns rounded one by one, later ones make up for the errors of earlier ones (Frantar et al. 2022).

    Attributes:
        block_size: columns between two matrix products.
        damp_percent: part of the mean of the Hessian's diagonal that is added to it.
        desc_act: begin with the columns of the largest inputs.
        static_groups: scales from the weights as they were; False: from the corrected weights, group by group.
        inside_layer_modules: names of linear layers in a decoder block, in order; empty: all, as they are called.
        model_decoder_layers: path of the decoder blocks; empty: found.
    """

    BOUNDS: ClassVar[Bounds] = {**ALIKE["gptq"], "damp_percent": NOT_NEGATIVE}
    name: str = "gptq"
    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""

    def check(self) -> None:
        """Orders that go with changing groups."""
        self.need(self.static_groups or not self.desc_act, "static_groups", "True where desc_act is")


@dataclass
class GPTAQConfig(GPTQConfig):
    """GPTQ that makes up for the error of its inputs as well (Li et al. 2025).

    Attributes:
        alpha: part of that correction.
        others: as in ``GPTQConfig``.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["gptaq"]
    name: str = "gptaq"
    alpha: float = 0.25


@dataclass
class QronosConfig(AlgoConfig):
    """Qronos: least-squares correction of the inputs' error, then diffusion of rounding errors (Zhang et al. 2025).

    Attributes:
        inside_layer_modules, model_decoder_layers, block_size, desc_act, static_groups: as in ``GPTQConfig``.
        alpha: part of the Hessian's largest eigenvalue that is added to its diagonal.
        beta: of the peer's factorization, where it changes only rounding errors; of no influence here.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["qronos"]
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""
    name: str = "qronos"
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True
    alpha: float = 1e-3
    beta: float = 1e4


@dataclass
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant: part of the range of activations goes to the weights (Xiao et al. 2023).

    Attributes:
        alpha: 0 (nothing) to 1 (the whole range).
        scale_clamp_min: lower bound of the scales.
        scaling_layers: places, as dictionaries with ``prev_op`` and ``layers``; empty: all that are found.
        model_decoder_layers: path of the decoder blocks; empty: found.
    """

    BOUNDS: ClassVar[Bounds] = {**ALIKE["smoothquant"], "scale_clamp_min": POSITIVE}
    name: str = "smooth"
    alpha: float = 1
    scale_clamp_min: float = 1e-3
    scaling_layers: list[dict[str, Any]] = field(default_factory=list)
    model_decoder_layers: str = ""


@dataclass
class AutoSmoothQuantConfig(AlgoConfig):
    """SmoothQuant with the best exponent at each place.

    Attributes:
        scaling_layers, model_decoder_layers: as in ``SmoothQuantConfig``.
        compute_scale_loss: "MSE", "MAE", or "RMSE" (mean of the roots of the absolute differences).
    """

    BOUNDS: ClassVar[Bounds] = {"compute_scale_loss": one_of("MSE", "MAE", "RMSE")}
    name: str = "autosmoothquant"
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str = "MSE"


@dataclass
class AWQConfig(AlgoConfig):
    """AWQ: channels of large activations are scaled up before rounding, then groups are clipped (Lin et al. 2023).

    Attributes:
        scaling_layers, model_decoder_layers: as in ``SmoothQuantConfig``.
    """

    name: str = "awq"
    scaling_layers: list[dict[str, Any]] = field(default_factory=list)
    model_decoder_layers: str = ""


@dataclass
class OnlineRotationConfig(KnownFields):
    """Which layers turn their inputs when the model runs; kept for files of the peer.

    Attributes:
        shared_parallel: layers that read one tensor share its rotation (here they always have equal ones).
        online_rotation_layers: names; None: all.
        use_input_prescale: of the peer.
    """

    shared_parallel: bool = True
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


@dataclass
class RotationConfig(AlgoConfig):
    """QuaRot: Hadamard rotations spread outliers over all channels (Ashkboos et al. 2024).

    Attributes:
        scaling_layers, backbone, model_decoder_layers, v_proj, o_proj, self_attn, mlp: where things are; found from
            the model, but for ``model_decoder_layers`` where it is given.
        r1: the residual stream.
        r2: values, head by head.
        r3: queries and keys behind the rotary embedding, for a cache quantized there (``kv_cache_post_rope``).
        r4: inputs of down projections, when the model runs.
        rotation_size: turn blocks of this many channels; None: all at once.
        random_r1, random_r2: with random signs (of a fixed seed).
        online_r1_rotation: turn the inputs of each layer when the model runs, instead of the residual stream.
        online_config, trainable, train_smooth, smooth_positions: of the peer; trained rotations are not available.
        only_if_better: where the samples' quantized answers get worse, other signs are tried, or nothing is turned. Not
            in the peer, whose files do not hold it.
    """

    scaling_layers: Any = None
    name: str = "rotation"
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    random_r1: bool = False
    random_r2: bool = False
    backbone: str = "model"
    model_decoder_layers: str = ""
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    online_r1_rotation: bool | None = None
    online_config: OnlineRotationConfig | None = None
    trainable: bool = False
    train_smooth: bool | None = None
    smooth_positions: list[str] | None = None
    only_if_better: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is ours alone only where it is not the default, for the peer refuses unknown fields."""
        return {key: value for key, value in asdict(self).items() if key != "only_if_better" or not value}

    def check(self) -> None:
        """What is there, and what goes together."""
        self.need(not self.trainable, "trainable", "False: trained rotations are not available")
        self.need(not self.train_smooth, "train_smooth", "None: trained rotations are not available")
        self.need(self.rotation_size is None or self.rotation_size > 0, "rotation_size", "positive, or None")
        some = self.r1 or self.r2 or self.r3 or self.r4
        self.need(some, "r1", "True where r2, r3 and r4 are not: nothing would be rotated")


@dataclass
class AutoRoundConfig(AlgoConfig):
    """AutoRound: learn the rounding of the weights of a block together (Cheng et al. 2023).

    Attributes:
        iters: steps per block.
        lr, minmax_lr: of the roundings and of the clips; they fall to 0.
        enable_minmax_tuning: clips are learned.
        batch_size: samples per step.
        inside_layer_modules, model_decoder_layers: as in ``GPTQConfig``.
    """

    BOUNDS: ClassVar[Bounds] = {"iters": COUNT, "batch_size": COUNT, "lr": POSITIVE, "minmax_lr": POSITIVE}
    name: str = "autoround"
    iters: int = 200
    lr: float = 1 / 200
    enable_minmax_tuning: bool = True
    minmax_lr: float = 1 / 200
    batch_size: int = 8
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""


@dataclass
class AdaQuantConfig(AlgoConfig):
    """AdaQuant: the weights of each layer, convolutions too, are trained through their rounding (Hubara et al. 2020).

    Not in the peer's torch flow; names and meaning as in ``quark.onnx``.

    Attributes:
        num_iterations: steps per layer.
        learning_rate: of Adam.
        batch_size: samples per step.
        data_size: samples used at most.
        drop_ratio: share of batches that take the quantized model's input; the others take the float model's.
        early_stop: stop a layer whose error no longer falls.
        shrinkage: pull weights to their float values as far as the samples leave them open.
        fixed_seed: of the order of the samples.
        model_decoder_layers: path of the decoder blocks; empty: found.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["adaquant"]
    name: str = "adaquant"
    num_iterations: int = 1000
    learning_rate: float = 1e-3
    batch_size: int = 1
    data_size: int = 64
    drop_ratio: float = 1.0
    early_stop: bool = False
    shrinkage: bool = True
    fixed_seed: int = 1705472343
    model_decoder_layers: str = ""


@dataclass
class AdaRoundConfig(AdaQuantConfig):
    """AdaRound: each weight of a layer, convolutions too, learns which way it is rounded (Nagel et al. 2020).

    Not in the peer's torch flow; names and meaning as in ``quark.onnx``.

    Attributes:
        reg_param: weight of the term that decides.
        beta_range: of its exponent, first and last.
        warm_start: part of the steps without it.
        others: as in ``AdaQuantConfig``; ``early_stop`` ends a layer when every rounding is decided.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["adaround"]
    name: str = "adaround"
    learning_rate: float = 0.1
    early_stop: bool = True
    reg_param: float = 0.01
    beta_range: tuple[float, float] | list[float] = (20.0, 2.0)
    warm_start: float = 0.2


@dataclass
class HQQConfig(AlgoConfig):
    """HQQ: scales and zero points without data (Badri & Shaji 2023); not in the peer's torch flow.

    Attributes:
        iterations: rounds.
        lp_norm: of the weight error; below 1.
        beta, kappa: weight of the outliers, and its growth per round.
    """

    BOUNDS: ClassVar[Bounds] = {"iterations": COUNT, "beta": POSITIVE, "kappa": RATIO}
    name: str = "hqq"
    iterations: int = 20
    lp_norm: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01

    def check(self) -> None:
        """The norm."""
        self.need(0 < self.lp_norm <= 1, "lp_norm", "above 0, at most 1")


@dataclass
class CLEConfig(AlgoConfig):
    """Cross-layer equalization: channels scaled between layers so that each can share one scale (Nagel et al. 2019).

    Attributes:
        cle_steps: times the whole model is gone through.
        cle_weight_threshold: channels whose largest magnitudes on both sides sum to less stay as they are.
        cle_scale_append_bias: count the bias as one more weight of its channel.
        model_decoder_layers: path of the decoder blocks; empty: found.
    """

    BOUNDS: ClassVar[Bounds] = {**ALIKE["cle"], "cle_steps": COUNT}
    name: str = "cle"
    cle_steps: int = 2
    cle_weight_threshold: float = 0.0
    cle_scale_append_bias: bool = True
    model_decoder_layers: str = ""


@dataclass
class ChannelEqualizationConfig(AlgoConfig):
    """Scale channels between layers so that weights and activations can share one scale per tensor.

    Like ``CLEConfig``, but the activations count as well. For models without decoder blocks; names and meaning as in
    ``quark.onnx``. Not in the peer's torch flow.

    Attributes:
        steps: times all places are gone through.
        widest: largest ratio of two scales of one layer.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["channel_equalization"]
    name: str = "channel_equalization"
    steps: int = 3
    widest: float = 64.0


@dataclass
class BiasCorrectionConfig(AlgoConfig):
    """Biases take back the shift of the channels' means that quantization causes (Nagel et al. 2019).

    Attributes:
        model_decoder_layers: path of the decoder blocks; empty: found.
        gain: scale the channels of the layers behind which no other stands so that deviations from the mean keep their
            size, too; they keep that, though the squared error may rise a little. Not for models with decoder blocks.
    """

    name: str = "bias_correction"
    model_decoder_layers: str = ""
    gain: bool = False


@dataclass
class SVDQuantConfig(AlgoConfig):
    """SVDQuant: a float branch of low rank takes the hard part of each weight (Li et al. 2024).

    Attributes:
        svd_rank: of the branch.
        smooth_alpha: exponent of the smoothing, where it is not searched.
        search_alpha: each layer takes the best of ``alpha_candidates``.
        alpha_candidates: exponents of the smoothing that are tried; None: 0.05 to 0.95.
        alpha_search_max_samples: of the peer; here up to 1024 rows over all samples are kept.
        exclude_patterns: layers whose name holds one of these stay without a branch.
        min_layer_size: of the smaller side of a weight.
        use_gptq, gptq_n_bits, gptq_symmetric, gptq_group_size, gptq_blocksize, gptq_percdamp, gptq_actorder: of the
            peer; put ``GPTQConfig`` behind this algorithm instead.
    """

    BOUNDS: ClassVar[Bounds] = ALIKE["svdquant"]
    name: str = "svdquant"
    svd_rank: int = 32
    smooth_alpha: float = 0.5
    search_alpha: bool = True
    alpha_candidates: list[float] | None = None
    alpha_search_max_samples: int = 8
    exclude_patterns: list[str] = field(
        default_factory=lambda: ["time_embedding", "add_time_proj", "conv_in", "conv_out", "time_proj"]
    )
    min_layer_size: int = 256
    use_gptq: bool = False
    gptq_n_bits: int = 4
    gptq_symmetric: bool = True
    gptq_group_size: int = -1
    gptq_blocksize: int = 128
    gptq_percdamp: float = 0.01
    gptq_actorder: bool = False

    def check(self) -> None:
        """What another algorithm does."""
        self.need(not self.use_gptq, "use_gptq", "False: put GPTQConfig behind SVDQuantConfig in algo_config")


def load_quant_algo_config_from_file(path: str | Path) -> AlgoConfig:
    """The algorithm that a JSON file describes.

    Args:
        path: of the file: an object with the ``name`` of an algorithm and its fields.

    Raises:
        ConfigError: no such file, no JSON, or an unknown algorithm or field.
    """
    data = read_json(path, ConfigError, "the configuration")
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {str(path)!r} must hold an object, and holds a {type(data).__name__}")
    return AlgoConfig.from_dict(data)


load_pre_optimization_config_from_file = load_quant_algo_config_from_file

__all__ = [
    "AWQConfig",
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "AutoRoundConfig",
    "AutoSmoothQuantConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "ChannelEqualizationConfig",
    "GPTAQConfig",
    "GPTQConfig",
    "HQQConfig",
    "OnlineRotationConfig",
    "QronosConfig",
    "RotationConfig",
    "SVDQuantConfig",
    "SmoothQuantConfig",
    "load_pre_optimization_config_from_file",
    "load_quant_algo_config_from_file",
]


def take_own() -> None:
    """Configuration classes for the registered algorithms that have none yet; they enter ``AlgoConfig.registry``."""
    for row in OWN.values():
        if row.name not in AlgoConfig.registry:
            named = [("name", str, row.name), *((name, type(value), value) for name, value in row.settings.items())]
            namespace = {"own": row, "__doc__": f"The algorithm {row.name!r}, which was registered."}
            make_dataclass(row.name, named, bases=(AlgoConfig,), namespace=namespace)


take_own()
