"""The configurations of the ONNX dialect: ``QConfig``, and the older ``Config(global_quant_config=…)``.

Both compile to a ``Job``. Compiling reads them and never changes them, so one object serves any number of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import field, replace
from typing import Any

from quark.config.job import Job, Target, for_target
from quark.config.known_fields import KnownFields, check_switches
from quark.config.options import Options, parse_options
from quark.config.presets import PRESETS, Preset, get_preset
from quark.config.rules import Rule, Rules
from quark.config.tensor import LayerSpec, TensorSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.formats import get_format
from quark.observers import distribution
from quark.observers.registry import BUILT_IN
from quark.onnx.quantization.config.algorithm import (
    AlgoConfig,
    AutoMixprecisionConfig,
    CLEConfig,
    GPTQConfig,
    checked,
)
from quark.onnx.quantization.config.selectors import Excluded, parse_mapping, parse_selectors, parse_types
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig, QuantGranularity
from quark.onnx.quantization.config.tuners import preset_tuners


class QConfig(KnownFields):
    """The configuration of one quantization.

    Args:
        global_config: specs of every layer that no other field names; ``Int8Spec()`` for both sides when omitted.
        specific_layer_config: layers by node name, ``^regular expression`` or subgraph ``(start names, end names)``.
            Later entries win.
        layer_type_config: layers by operator type; the key ``None`` keeps its types in float.
        exclude: nodes kept in float, by name, ``^regular expression`` or subgraph.
        algo_config: algorithms such as ``CLEConfig()`` and ``AdaRoundConfig()``; each kind runs in the order given.
        use_external_data_format: write the weights beside the model file (automatic above 2 GB).
        extra_options: see ``quark.config.options.Options``.
        target: "any", or "cpu" for a model that is fast on ONNX Runtime's CPU provider.
        use_dynamic_quant: find the ranges of activations at run time; weights are int8 or uint8. No data is needed.
    """

    def __init__(
        self,
        global_config: QLayerConfig | None = None,
        specific_layer_config: dict[QLayerConfig, list[Excluded]] | None = None,
        layer_type_config: dict[QLayerConfig | None, list[str]] | None = None,
        exclude: list[Excluded] | None = None,
        algo_config: list[AlgoConfig] | None = None,
        use_external_data_format: bool = False,
        extra_options: dict[str, Any] | None = None,
        target: Target = "any",
        use_dynamic_quant: bool = False,
    ) -> None:
        self.global_config = global_config or _default_layer(use_dynamic_quant)
        self.specific_layer_config = specific_layer_config or {}
        self.layer_type_config = layer_type_config or {}
        self.exclude = exclude or []
        self.algo_config = algo_config or []
        self.use_external_data_format = use_external_data_format
        self.extra_options = extra_options or {}
        self.target = target
        self.use_dynamic_quant = use_dynamic_quant
        self.compile()  # a configuration that cannot work is refused here, not at the end of a long calibration

    def compile(self) -> Job:
        """The job that this configuration stands for.

        Raises:
            ConfigError: a field that cannot work, named with its value and what is allowed.
        """
        check_switches(self, "use_external_data_format", "use_dynamic_quant")
        algorithms = checked(self.algo_config)
        if not isinstance(self.global_config, QLayerConfig):
            raise ConfigError(
                "global_config must be a QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), not "
                f"{self.global_config!r}"
            )
        if self.global_config.weight is None:
            raise ConfigError("global_config: the field weight is required")
        options = parse_options(self.extra_options)
        default = with_options(self.global_config.to_layer(), options)
        if self.use_dynamic_quant:
            default = _dynamic(default)
        if default.inputs is None and not options.WeightsOnly:
            raise ConfigError("global_config: the field input_tensors is required (or set the option WeightsOnly)")
        refined = tuple(self._refinements(default, options))
        if self.use_dynamic_quant:
            refined = tuple(replace(rule, layer=rule.layer and _dynamic(rule.layer)) for rule in refined)
        rules = Rules(_with_weights_of(algorithms, default), refined)
        return for_target(_announced(Job(rules, options, self.target, self.use_external_data_format, algorithms)))

    def _refinements(self, default: LayerSpec, options: Options) -> Iterator[Rule]:
        """What operator types, layers and excluded nodes become, in order of rising priority."""
        for source, parse in (("layer_type_config", parse_types), ("specific_layer_config", parse_selectors)):
            for layer, names in parse_mapping(getattr(self, source), source, QLayerConfig).items():
                merged, by_type = merged_layer(layer, default, options), parse is parse_types
                yield Rule(parse(names, source), merged, source, by_type=by_type, **_said_of(layer))
        if self.exclude:
            yield Rule(parse_selectors(self.exclude, "exclude"), None, "exclude")

    @staticmethod
    def get_default_config(name: str) -> Config:
        """The preset ``name`` as a configuration object of its own."""
        return Config(global_quant_config=get_default_config(name))


def _default_layer(dynamic: bool) -> QLayerConfig:
    """What a configuration without a global one means."""
    if dynamic:
        return QLayerConfig(weight=Int8Spec(quant_granularity=QuantGranularity.Channel))
    return QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())


def _said_of(layer: QLayerConfig | None) -> dict[str, Any]:
    """Of which activations an entry says something; outputs that it leaves open are as its inputs."""
    inputs = layer is not None and layer.input_tensors is not None
    outputs = layer is not None and layer.output_tensors is not None
    written = frozenset([*(["inputs"] if inputs else []), *(["outputs"] if inputs or outputs else [])])
    return {"outputs": outputs, "written": written}


def merged_layer(config: QLayerConfig | None, default: LayerSpec, options: Options) -> LayerSpec | None:
    """A layer's specs, with the global ones in the slots that it leaves open; ``None`` stays: float."""
    if config is None:
        return None
    layer = with_options(config.to_layer(), options)
    return LayerSpec(
        layer.inputs or default.inputs,
        layer.weight or default.weight,
        layer.bias or default.bias,
        layer.outputs or default.outputs,
    )


def _announced(job: Job) -> Job:
    """The job with the data types that automatic mixed precision may choose, in rules that name no node yet: the model
    is prepared (its opset, above all) for every type that may be in it."""
    found = [
        Rule((), one if isinstance(one, LayerSpec) else merged_layer(one, job.rules.default, job.options), entry.name)
        for entry in job.algorithms
        if isinstance(entry, AutoMixprecisionConfig)
        for one, _ in entry.targets()
    ]
    return job.ruled(found) if found else job


_WEIGHT_METHODS = {"MinMax": "minmax", "MinMSE": "mse"}


def with_options(layer: LayerSpec, options: Options) -> LayerSpec:
    """Options that refine the specs: settings of the calibration methods, the search of float-scale weights."""
    for slot, spec in (("input_tensors", layer.inputs), ("output_tensors", layer.outputs)):
        _check_distribution(slot, spec)
    weight = layer.weight
    if weight is not None:
        weight = replace(weight, method=_weight_method(weight, options.WeightCalibrateMethod))
        if weight.method == "mse" and weight.scale_rule != "power_of_two" and options.MinMSEModeFloatScale != "All":
            weight = replace(weight, settings=(("mode", options.MinMSEModeFloatScale),))
    if options.Int16Scale:
        _check_int16_scale(layer)
        layer = replace(layer, inputs=_int16(layer.inputs), outputs=_int16(layer.outputs))
        weight = _int16(weight)
    return replace(layer, weight=weight)


def _check_int16_scale(layer: LayerSpec) -> None:
    for slot, spec in (("input_tensors", layer.inputs), ("weight", layer.weight), ("output_tensors", layer.outputs)):
        if spec is not None and spec.scale_rule == "power_of_two":
            raise ConfigError(
                f"Int16Scale replaces float scales, and the scale_type of {slot} is PowerOf2: use ScaleType.Float32, "
                "or leave Int16Scale out"
            )


def _check_distribution(slot: str, spec: TensorSpec | None) -> None:
    if spec is not None and spec.method == "distribution" and not distribution.fits(spec.row):
        raise ConfigError(
            f"{slot}: the calibration method Distribution is for the FP8 data types only, and this one is "
            f"{spec.format!r}. Use FP8E4M3Spec or FP8E5M2Spec, or another method: MinMax, Percentile, "
            "LayerwisePercentile, MinMSE, Entropy"
        )


def _weight_method(weight: TensorSpec, from_option: str | None) -> str:
    """Weights are searched on all their values: by extremes, by least squared error where the spec says so, or by a
    method that was registered."""
    if weight.method not in BUILT_IN:
        return weight.method
    if weight.scale_rule == "power_of_two":
        return "minmax" if weight.method == "minmax" else "mse"
    return _WEIGHT_METHODS[from_option] if from_option else "mse" if weight.method == "mse" else "minmax"


def _with_weights_of(algorithms: Sequence[AlgoConfig], layer: LayerSpec) -> LayerSpec:
    """The layer with the weights that a ``GPTQConfig`` asks for."""
    last = next((entry for entry in reversed(algorithms) if isinstance(entry, GPTQConfig)), None)
    return layer if last is None or layer.weight is None else replace(layer, weight=last.weight_spec(layer.weight))


_RUN_TIME = TensorSpec("uint8", symmetric=False, dynamic=True)


def _dynamic(layer: LayerSpec) -> LayerSpec:
    """The layer with activations that are quantized at run time."""
    given = layer.inputs
    if given is not None and (given.format, given.symmetric) != (_RUN_TIME.format, _RUN_TIME.symmetric):
        raise ConfigError(
            f"use_dynamic_quant: activations are uint8 with a zero point at run time, not {given.format!r}; leave "
            "input_tensors out, or give UInt8Spec()"
        )
    if layer.weight is not None and layer.weight.row.onnx_type not in ("INT8", "UINT8"):
        raise ConfigError(f"use_dynamic_quant: weights are int8 or uint8, not {layer.weight.format!r}")
    return LayerSpec(_RUN_TIME, layer.weight)


def _int16(spec: Any) -> Any:
    return spec and replace(spec, scale_rule="int16")


@dataclass
class QuantizationConfig(KnownFields):
    """The older form of a global configuration, as ``get_default_config`` returns it.

    Attributes:
        layer: specs of activations and weights.
        extra_options: see ``quark.config.options.Options``.
        include_cle: run ``CLEConfig()`` before the algorithms.
        enable_npu_cnn, enable_npu_transformer: the options ``EnableNPUCnn`` and ``EnableNPUTransformer``.
        algorithms: as ``algo_config`` of ``QConfig``.
        exclude: as in ``QConfig``; ``nodes_to_exclude`` and ``subgraphs_to_exclude`` are its older spellings.
        layers: specs of single layers by node name or ``^regular expression``, as a search finds them; ``None`` keeps a
            layer and its inputs in float. Later entries win, also at tensors that layers share.
        op_types_to_quantize, extra_op_types_to_quantize, nodes_to_quantize: the options ``OpTypesToQuantize``,
            ``ExtraOpTypesToQuantize`` and ``NodesToQuantize``; empty: the flow's defaults.
        nodes_to_exclude, subgraphs_to_exclude: what stays float, by name, ``^regular expression`` or (start, end).
        execution_providers: the option ``ExecutionProviders``: where ONNX Runtime runs the calibration.
        optimize_model: fold and fuse the float model first.
        use_external_data_format, target, use_dynamic_quant: as in ``QConfig``.
        print_summary: print what was done.
        debug_mode, crypto_mode, ignore_warnings: the options ``DebugMode``, ``CryptoMode`` and ``IgnoreWarnings``.
    """

    layer: LayerSpec
    extra_options: dict[str, Any] = field(default_factory=dict)
    op_types_to_quantize: list[str] = field(default_factory=list)
    extra_op_types_to_quantize: list[str] = field(default_factory=list)
    nodes_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    subgraphs_to_exclude: list[tuple[list[str], list[str]]] = field(default_factory=list)
    execution_providers: list[str] = field(default_factory=lambda: ["CPUExecutionProvider"])
    optimize_model: bool = True
    use_external_data_format: bool = False
    print_summary: bool = True
    include_cle: bool = True
    enable_npu_cnn: bool | None = None
    enable_npu_transformer: bool = False
    algorithms: list[AlgoConfig] = field(default_factory=list)
    target: Target = "any"
    use_dynamic_quant: bool = False
    debug_mode: bool = False
    crypto_mode: bool = False
    ignore_warnings: bool = True
    layers: dict[str, LayerSpec | None] = field(default_factory=dict)

    @classmethod
    def from_preset(cls, preset: Preset) -> QuantizationConfig:
        """A fresh, independent configuration with the preset's values."""
        layer = LayerSpec(preset.activation, preset.weight, None, preset.activation)
        return cls(
            layer=layer,
            extra_options=deepcopy(dict(preset.options)),
            target=preset.target,
            include_cle=preset.cle,
            algorithms=[*_mixing(preset), *_fine_tuning(preset)],
            use_dynamic_quant=preset.activation.dynamic,
        )


def _mixing(preset: Preset) -> list[AlgoConfig]:
    """The automatic mixed precision of a preset; pairs for both precisions where block formats meet others."""
    if preset.mixed is None:
        return []
    blocks = get_format(preset.mixed.weight.format).unit_scale if preset.mixed.weight is not None else False
    return [AutoMixprecisionConfig(target_layer_config=preset.mixed, dual_quant_nodes=blocks)]


def _fine_tuning(preset: Preset) -> list[AlgoConfig]:
    """The fine-tuning of a preset, with the settings that presets have."""
    if not preset.tuning:
        return []
    return [replace(preset_tuners()[preset.tuning])]


_SWITCHES = ("include_cle", "enable_npu_transformer", "use_external_data_format", "use_dynamic_quant")


class Config(KnownFields):
    """The older wrapper: ``Config(global_quant_config=get_default_config("XINT8"))``.

    Args:
        global_quant_config: what ``get_default_config`` returns.
    """

    def __init__(self, global_quant_config: QuantizationConfig) -> None:
        if not isinstance(global_quant_config, QuantizationConfig):
            raise ConfigError(
                f"Config: global_quant_config must come from get_default_config(name), not {global_quant_config!r}"
            )
        self.global_quant_config = global_quant_config
        self.compile()

    def compile(self) -> Job:
        """The job that this configuration stands for."""
        legacy = self.global_quant_config
        check_switches(legacy, *_SWITCHES)
        if not isinstance(legacy.layer, LayerSpec):
            raise ConfigError(f"the field layer must be a LayerSpec, not {legacy.layer!r}")
        for name, spec in legacy.layers.items():
            if not isinstance(spec, LayerSpec | None):
                raise ConfigError(f"layers: {name!r} must have a LayerSpec or None, not {spec!r}")
        lists = {
            "OpTypesToQuantize": legacy.op_types_to_quantize,
            "ExtraOpTypesToQuantize": legacy.extra_op_types_to_quantize,
            "NodesToQuantize": legacy.nodes_to_quantize,
        }
        modes = {"EnableNPUTransformer": True} if legacy.enable_npu_transformer else {}
        if legacy.enable_npu_cnn is not None:
            modes["EnableNPUCnn"] = legacy.enable_npu_cnn
        given = {
            "ExecutionProviders": legacy.execution_providers,
            "OptimizeModel": legacy.optimize_model,
            "PrintSummary": legacy.print_summary,
            "DebugMode": legacy.debug_mode,
            "CryptoMode": legacy.crypto_mode,
            "IgnoreWarnings": legacy.ignore_warnings,
            **{name: value for name, value in lists.items() if value},
            **modes,
        }
        own = legacy.extra_options or {}
        options = parse_options({**given, **own} if isinstance(own, Mapping) else own)
        excluded = (
            *parse_selectors(legacy.nodes_to_exclude, "nodes_to_exclude"),
            *parse_selectors(legacy.subgraphs_to_exclude, "subgraphs_to_exclude"),
        )
        layer = with_options(legacy.layer, options)
        layer = _dynamic(replace(layer, inputs=None)) if legacy.use_dynamic_quant else layer
        single = [
            Rule((name,), spec and with_options(spec, options), "layers", inputs=spec is None)
            for name, spec in legacy.layers.items()
        ]
        algorithms = checked(legacy.algorithms, "algorithms")
        layer = _with_weights_of(algorithms, layer)
        rules = Rules(layer, (*single, Rule(excluded, None, "nodes_to_exclude")) if excluded else tuple(single))
        wanted = legacy.include_cle and not (legacy.use_dynamic_quant or options.UseMatMulNBits)
        if wanted and not any(isinstance(entry, CLEConfig) for entry in algorithms):
            algorithms = (CLEConfig(), *algorithms)
        return for_target(_announced(Job(rules, options, legacy.target, legacy.use_external_data_format, algorithms)))


def get_default_config_mapping() -> dict[str, QuantizationConfig]:
    """Every preset by name, each a fresh configuration."""
    return {name: QuantizationConfig.from_preset(row) for name, row in PRESETS.items()}


def get_default_config(name: str) -> QuantizationConfig:
    """The preset of this name as a fresh configuration that the caller may change.

    Args:
        name: as `quark presets` lists it, also with ``_CONFIG`` behind it.

    Raises:
        ConfigError: no such preset; the nearest name is shown.
    """
    return QuantizationConfig.from_preset(get_preset(name))
