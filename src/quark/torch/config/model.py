"""``QLayerConfig`` and ``QConfig``: which tensors of which layers are quantized, and how.

    global_quant_config       every layer that nothing below names
    layer_type_quant_config   layers of a type (subclasses too)
    layer_quant_config        layers by name: exact names first, then globs in the order in which they are written
    exclude                   names and globs that stay float; it wins

Fields that are recorded but not used yet are refused by name when a model is quantized; ``UNAVAILABLE`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields
from enum import Enum
from typing import Any

from quark import __version__
from quark.config.algorithm import not_one
from quark.config.known_fields import KnownFields, check_switches
from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError, check_names
from quark.numerics.granularity import Channel, Tensor
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.cache import check_cache
from quark.torch.config.tensor import QTensorConfig, blocks_of, element_of, refuse
from quark.torch.config.type import DeviceType, Dtype, QSchemeType, QuantFlow, QuantizationMode, member
from quark.torch.stage import Stage, Stages

SLOTS = ("input_tensors", "output_tensors", "weight", "bias")
MODES: dict[str, type[Enum]] = {"quant_mode": QuantizationMode, "quant_flow": QuantFlow}
SWITCHES = ("kv_cache_post_rope", "kv_cache_per_head", "sync_moe_expert_input_amax", "keep_prequantized_layers")
SECOND_LEVEL = {Dtype.fp8_e4m3: "e4m3", Dtype.fp8_e5m3: "e5m3"}
TensorConfigs = QTensorConfig | list[QTensorConfig] | None


@dataclass(eq=True)
class QLayerConfig(KnownFields):
    """The tensors of a layer; ``None`` stays float.

    Attributes:
        input_tensors, output_tensors, weight, bias: a tensor configuration, or a list of two: the second quantizes what
            the first has made (its values, or with ``is_scale_quant`` its scales).
        target_device: recorded.
    """

    input_tensors: TensorConfigs = None
    output_tensors: TensorConfigs = None
    weight: TensorConfigs = None
    bias: TensorConfigs = None
    target_device: DeviceType | None = None

    def __post_init__(self) -> None:
        for slot in SLOTS:
            self.stages(slot)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, member(DeviceType, name, value) if name == "target_device" else value)

    def stages(self, slot: str) -> Stages:
        """What runs on the tensor called ``slot``; empty: it stays float."""
        configs = getattr(self, slot)
        check_slot(slot, configs)
        if configs is None:
            return ()
        if isinstance(configs, QTensorConfig):
            return (configs.to_stage(),)
        return compile_list(slot, configs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        slots: dict[str, Any] = {slot: slot_to_dict(getattr(self, slot)) for slot in SLOTS}
        return {**slots, "target_device": self.target_device.name if self.target_device else None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QLayerConfig:
        """The configuration that ``to_dict`` described."""
        check_keys("layer configuration", data, [item.name for item in fields(cls)])
        slots = {slot: slot_from_dict(data.get(slot)) for slot in SLOTS}
        return cls(**slots, target_device=data.get("target_device"))


def check_slot(slot: str, value: Any) -> None:
    """A slot holds a tensor configuration, a non-empty list of them, or None; static inputs have no group scales."""
    configs = value if isinstance(value, list) else [] if value is None else [value]
    if value == [] or not all(isinstance(config, QTensorConfig) for config in configs):
        raise TypeError(
            f"the field {slot} must be a QTensorConfig, a list of them or None, not {value!r}; a helper such as "
            f"Int8PerTensorSpec becomes one with .to_quantization_spec()"
        )
    if slot in ("input_tensors", "output_tensors") and configs:
        first = configs[0]
        if first.qscheme is QSchemeType.per_group and first.is_dynamic is False:
            refuse(f"{slot}: group scales of activations are taken at run time; per_group needs is_dynamic=True")


def compile_list(slot: str, configs: list[QTensorConfig]) -> Stages:
    """The stages of a list of tensor configurations."""
    if len(configs) > 2:
        refuse(f"{slot}: a tensor has one or two stages, and this one has {len(configs)}")
    if len(configs) == 2 and configs[1].is_scale_quant:
        return (two_level(slot, *configs),)
    if len(configs) == 2 and any(config.observer_cls is not None and config.observer_cls.trained for config in configs):
        refuse(f"{slot}: a scale that is learned belongs to a tensor with one stage, and this one has two")
    if any(config.is_scale_quant for config in configs):
        refuse(
            f"{slot}: is_scale_quant=True quantizes the scales of a stage before it, so it must be the second of two"
        )
    stages = tuple(config.to_stage() for config in configs)
    if len(stages) == 2 and slot in ("input_tensors", "output_tensors") and stages[1].calibrated:
        refuse(f"{slot}: the second stage of an activation is taken at run time; it needs is_dynamic=True")
    return stages


def two_level(slot: str, first: QTensorConfig, second: QTensorConfig) -> Stage:
    """Blocks whose scales are quantized under one float32 scale: NVFP4 (E4M3) and its E5M3 variant."""
    stage, level = first.to_stage(), second.to_stage()
    if first.dtype is not Dtype.fp4 or stage.is_block or first.qscheme is not QSchemeType.per_group:
        refuse(
            f"{slot}: the scales of fp4 per_group with scale_format 'float32' can be quantized, not "
            f"those of {first.dtype.name}"
        )
    if second.dtype not in SECOND_LEVEL or second.qscheme is not QSchemeType.per_tensor:
        refuse(f"{slot}: scales are quantized to fp8_e4m3 or fp8_e5m3 per_tensor, not to {second.dtype.name}")
    spec = TensorSpec(
        blocks_of(element_of(first.dtype), "e4m3")[0].name,
        granularity=stage.spec.granularity,
        scale_rule=SECOND_LEVEL[second.dtype],
        rounding=stage.spec.rounding,
        dynamic=level.spec.dynamic,
    )
    return Stage(spec, level.observer)


def slot_to_dict(value: TensorConfigs) -> Any:
    """A slot as plain values."""
    return [config.to_dict() for config in value] if isinstance(value, list) else value.to_dict() if value else None


def slot_from_dict(value: Any) -> TensorConfigs:
    """A slot from plain values."""
    if isinstance(value, list):
        return [QTensorConfig.from_dict(item) for item in value]
    return QTensorConfig.from_dict(value) if value else None


def check_keys(kind: str, data: Mapping[str, Any], allowed: list[str]) -> None:
    """Every key is known."""
    if not isinstance(data, Mapping):
        refuse(f"a {kind} is a dictionary, not {data!r}")
    check_names(f"field of a {kind}", data, allowed)


@dataclass(eq=True)
class QConfig(KnownFields):
    """How a model is quantized; ``ModelQuantizer`` reads it and never changes it.

    Attributes:
        global_quant_config: for every quantizable layer but embeddings, which must be named or typed.
        exclude: names and globs of layers that stay float.
        algo_config: algorithms that improve on rounding, in order.
        log_severity_level: level of the logger of this package, 0 (debug) to 4 (critical); 1 leaves it as it is.
        version: of the package that wrote it.
        layer_type_quant_config: by module class.
        layer_quant_config: by name or glob.
        kv_cache_quant_config: by name or glob of the layers that make keys and values, whose format is
            ``output_tensors``.
        kv_cache_group: names and globs whose static scales become their maximum in each attention module.
        min_kv_scale: least static scale of keys and values.
        kv_cache_post_rope: quantize keys after rotary embedding, on their way into the cache.
        shared_scale_groups: names of siblings (query, key, value) whose weights share their largest tensor scale.
        softmax_quant_spec: of attention probabilities; needs eager attention.
        quant_mode, quant_flow, gpu_resident_blocks: eager mode of a model in memory.
        sync_moe_expert_input_amax: experts of a layer share their static input range, those without tokens too.
        keep_prequantized_layers: keep excluded layers that the source had already quantized.
        kv_cache_per_head: static per_channel scales of keys and values become their maximum in each head.
    """

    global_quant_config: QLayerConfig
    exclude: list[str] = field(default_factory=list)
    algo_config: list[AlgoConfig] | None = None
    log_severity_level: int | None = 1
    version: str | None = __version__
    layer_type_quant_config: dict[type, QLayerConfig] = field(default_factory=dict)
    layer_quant_config: dict[str, QLayerConfig] = field(default_factory=dict)
    kv_cache_quant_config: dict[str, QLayerConfig] = field(default_factory=dict)
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    kv_cache_post_rope: bool = False
    shared_scale_groups: list[list[str]] = field(default_factory=list)
    softmax_quant_spec: QTensorConfig | None = None
    quant_mode: QuantizationMode = QuantizationMode.eager_mode
    quant_flow: QuantFlow = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True
    kv_cache_per_head: bool = False

    def __post_init__(self) -> None:
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        value = list(value) if name == "algo_config" and isinstance(value, tuple) else value
        super().__setattr__(name, member(MODES[name], name, value) if name in MODES else value)

    def check(self) -> None:
        """Raise for a field that cannot be, those of layers, tensors and algorithms too: all may change after they are
        made.

        Raises:
            TypeError: a field of another type.
            ConfigError: a value that cannot be, or that does not go with others.
        """
        for name, value in self._layers():
            if not isinstance(value, QLayerConfig):
                raise TypeError(f"the field {name} must be a QLayerConfig, not {value!r}")
            value.__post_init__()
        check_switches(self, *SWITCHES)
        if not is_names(self.exclude):
            raise TypeError(f"the field exclude must be a list of layer names and globs, not {self.exclude!r}")
        layer_types(self.layer_type_quant_config)
        check_cache("kv_cache_quant_config", self.kv_cache_quant_config)
        check_cache_scales(self)
        check_algorithms(self.algo_config)

    def _layers(self) -> Iterator[tuple[str, Any]]:
        """The configurations of layers, by what they are called in messages."""
        yield "global_quant_config", self.global_quant_config
        for name in ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise TypeError(f"the field {name} must be a dictionary, not {given!r:.80}")
            shown = str if name == "layer_type_quant_config" else repr
            yield from ((f"{name}[{shown(key)}]", value) for key, value in given.items())

    @staticmethod
    def with_llm_template(
        template: Any,
        scheme: str,
        algorithm: str | list[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: dict[str, str] | None = None,
        layer_type_config: dict[type, str] | None = None,
        exclude_layers: list[str] | None = None,
    ) -> QConfig:
        """``template.get_config`` with these arguments; ``template`` is an ``LLMTemplate``."""
        more = (min_kv_scale, attention_scheme, layer_config, layer_type_config, exclude_layers)
        return template.get_config(scheme, algorithm, kv_cache_scheme, *more)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``quantization_config`` of a checkpoint holds them; rarely used fields only where set."""
        always = {
            "algo_config": None if self.algo_config is None else [item.to_dict() for item in self.algo_config],
            "exclude": list(self.exclude),
            "global_quant_config": self.global_quant_config.to_dict(),
            "kv_cache_post_rope": self.kv_cache_post_rope,
            "kv_cache_quant_config": {name: value.to_dict() for name, value in self.kv_cache_quant_config.items()},
            "layer_quant_config": {name: value.to_dict() for name, value in self.layer_quant_config.items()},
            "layer_type_quant_config": {
                key.__name__: value.to_dict() for key, value in layer_types(self.layer_type_quant_config).items()
            },
            "quant_mode": self.quant_mode.name,
            "softmax_quant_spec": self.softmax_quant_spec.to_dict() if self.softmax_quant_spec else None,
            "version": self.version,
        }
        set_values = {name: getattr(self, name) for name, default in RARE.items() if getattr(self, name) != default}
        return {**always, **set_values}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QConfig:
        """The configuration that ``to_dict``, or a checkpoint of the peer, describes.

        Raises:
            ConfigError: an unknown key or name, or no global configuration.
        """
        names = [item.name for item in fields(cls)]
        check_keys("quantization configuration", data, [*names, *OF_CHECKPOINTS])
        if not data.get("global_quant_config"):
            refuse("a quantization configuration needs the field global_quant_config")
        values = {name: data[name] for name in names if name in data and name in (*RARE, *PLAIN)}
        values = {name: value for name, value in values.items() if value is not None or name not in SWITCHES}
        softmax, algorithms = data.get("softmax_quant_spec"), data.get("algo_config")
        return cls(
            QLayerConfig.from_dict(data["global_quant_config"]),
            algo_config=None if algorithms is None else [AlgoConfig.from_dict(item) for item in algorithms],
            layer_quant_config=layers_from_dict(data.get("layer_quant_config")),
            kv_cache_quant_config=layers_from_dict(data.get("kv_cache_quant_config")),
            layer_type_quant_config=layer_types(layers_from_dict(data.get("layer_type_quant_config"))),
            exclude=list(data.get("exclude") or []),
            quant_mode=data.get("quant_mode") or QuantizationMode.eager_mode,
            softmax_quant_spec=QTensorConfig.from_dict(softmax) if softmax else None,
            **values,
        )


Config = QConfig


def is_names(value: Any) -> bool:
    """Whether there are names, and not one text, which would count letter by letter."""
    return not isinstance(value, str) and isinstance(value, Iterable) and all(isinstance(one, str) for one in value)


def check_algorithms(configs: list[AlgoConfig] | None) -> None:
    """A list of algorithms, or None."""
    if configs is not None and not isinstance(configs, list):
        raise TypeError(f"the field algo_config must be a list of algorithms such as GPTQConfig(), not {configs!r:.80}")
    for one in configs or []:
        if not isinstance(one, AlgoConfig):
            raise TypeError(
                f"the field algo_config must be a list of algorithms: {not_one(one, AlgoConfig.registry.values())}"
            )
        one.__post_init__()


def check_cache_scales(config: QConfig) -> None:
    """Fields that change static symmetric scales, so there are such scales."""
    least: Any = config.min_kv_scale
    if not isinstance(least, int | float) or isinstance(least, bool) or not 0 <= least < float("inf"):
        refuse(f"min_kv_scale must be a number of at least 0, not {config.min_kv_scale!r}")
    known = ("kv_cache_group", "min_kv_scale", "kv_cache_per_head", "kv_cache_post_rope")
    used = [name for name in known if getattr(config, name)]
    if used and not config.kv_cache_quant_config:
        refuse(f"{used[0]} says how keys and values are quantized, and kv_cache_quant_config says that they are not")
    for changed in (name for name in used if name != "kv_cache_post_rope"):
        kind, words = (Channel, "per_channel") if changed == "kv_cache_per_head" else (Tensor, "per_tensor")
        for name, layer in config.kv_cache_quant_config.items():
            (stage,) = layer.stages("output_tensors")
            if not (stage.calibrated and stage.spec.symmetric and isinstance(stage.spec.granularity, kind)):
                refuse(
                    f"{changed} needs static symmetric {words} scales, and kv_cache_quant_config[{name!r}] has others"
                )


OF_CHECKPOINTS = ("export", "quant_method")  # keys beside ours in the file of a checkpoint
PLAIN = ("kv_cache_post_rope", "version")
RARE: dict[str, Any] = {
    "log_severity_level": 1,
    "kv_cache_group": [],
    "min_kv_scale": 0.0,
    "kv_cache_per_head": False,
    "shared_scale_groups": [],
    "sync_moe_expert_input_amax": False,
    "keep_prequantized_layers": True,
}
OF_BLOCKS = (
    "quantize_model works on a model that is in memory as a whole; for one that is not, "
    "direct_quantize_checkpoint(source, target, dataloader=...) quantizes its files with one decoder block in memory"
)
UNAVAILABLE: dict[str, tuple[Any, ...]] = {  # a field and the values with which a model can be quantized
    "quant_flow": (QuantFlow.standard, QuantFlow.file2file),
    "gpu_resident_blocks": (0,),
}


def layers_from_dict(data: Mapping[str, Any] | None) -> dict[str, QLayerConfig]:
    """Layer configurations by name."""
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError(f"configurations of layers are a dictionary by name, not {data!r:.80}")
    return {name: QLayerConfig.from_dict(value) for name, value in (data or {}).items()}


def layer_types(named: Mapping[Any, QLayerConfig]) -> dict[Any, QLayerConfig]:
    """The configurations of layer types by class; torch is loaded where there are some.

    Raises:
        ConfigError: a type that is none of layers.
    """
    if not named:
        return {}
    from quark.torch.layers import type_of_name

    return {type_of_name(key): value for key, value in named.items()}


def check_available(config: QConfig) -> None:
    """Raise for a field that cannot be, as ``QConfig.check``, or that asks for something that is not there."""
    config.check()
    for name, allowed in UNAVAILABLE.items():
        value = getattr(config, name)
        if value not in allowed:
            known = " and ".join(getattr(item, "name", str(item)) for item in allowed)
            refuse(f"{name}={getattr(value, 'name', value)} is not available ({known}: available); {OF_BLOCKS}")


__all__ = ["Config", "QConfig", "QLayerConfig", "check_available"]
