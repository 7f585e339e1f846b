"""``LLMTemplate``: a configuration for a language model from a scheme's name.

    LLMTemplate.get("llama").get_config("int4_wo_128", kv_cache_scheme="fp8")
    LLMTemplate.for_model(model).get_config("fp8")          architectures that nobody has described too

A template knows which layers make queries, keys and values and which stay float. That of a model is read from its
modules: the layer after the last block is its head, an attention module is one that is handed a cache, a router is a
linear layer beside experts. Rows of ``quark.torch.architectures`` say the same without a model.

Keys and values that one layer makes together are quantized after rotary embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from quark.algorithms.names import TORCH
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, unknown
from quark.torch.architectures import ARCHITECTURES
from quark.torch.config import schemes
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.specs import FP8E4M3PerTensorSpec
from quark.torch.config.tensor import QTensorConfig
from quark.torch.kv_cache import role_of
from quark.torch.layers import kind_of
from quark.torch.patterns import Usual
from quark.torch.template_reading import GATE_UP, ModuleFacts, in_towers, read_modules


@dataclass
class LLMTemplate:
    """What has to be known of a kind of language model to configure its quantization.

    Attributes:
        model_type: as ``config.model_type`` of transformers.
        kv_layers_name: globs of the layers that make keys and values.
        q_layer_name: glob of the layer that makes queries.
        gate_up_layers_name: last parts of the names of the layers that open a feed-forward network.
        exclude_layers_name: globs of the layers that stay float unless told otherwise.
        algorithm_configs: settings of algorithms by name, where their defaults are not right.
    """

    model_type: str
    kv_layers_name: list[str] | None = None
    q_layer_name: str | list[str] | None = None
    gate_up_layers_name: list[str] | None = field(default_factory=lambda: list(GATE_UP))
    exclude_layers_name: list[str] = field(default_factory=list)
    algorithm_configs: dict[str, Any] | None = None

    registry: ClassVar[dict[str, LLMTemplate]] = {}

    @classmethod
    def list_available(cls) -> list[str]:
        """Every model type that ``get`` knows."""
        return sorted({*ARCHITECTURES, *cls.registry})

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """The template of a model type.

        Raises:
            ConfigError: no such type; the nearest is shown. ``for_model`` needs none.
        """
        if model_type in cls.registry:
            return cls.registry[model_type]
        if model_type not in ARCHITECTURES:
            sentence = unknown("model type", model_type, cls.list_available())
            raise ConfigError(f"{sentence} LLMTemplate.for_model(model) makes a template for any language model.")
        row = ARCHITECTURES[model_type]
        return cls(model_type, list(row.kv), row.q, list(row.gate_up), list(row.exclude))

    @classmethod
    def for_model(cls, model: nn.Module) -> LLMTemplate:
        """The template of a model: that of its type, with the layers that only its modules tell; or what they tell.

        Raises:
            ModelError: neither a model type, nor an attention module whose layers are recognized, nor a head.
        """
        known_type = getattr(getattr(model, "config", None), "model_type", None)
        model_type = str(known_type or type(model).__name__)
        if model_type in cls.registry:
            return cls.registry[model_type]
        told = read_modules(model)
        if not known_type and not told.floats and not told.kv:  # encoders need have neither
            raise ModelError(
                f"{type(model).__name__} ({model_type}) has neither attention whose layers are recognized nor a layer "
                f"whose output is as long as the vocabulary; make a template with LLMTemplate({model_type!r}, "
                f"kv_layers_name=[...], exclude_layers_name=[...])"
            )
        if model_type not in ARCHITECTURES:
            return cls(model_type, told.kv, told.q, told.gate_up, told.floats)
        return of_row(cls.get(model_type), told, model)

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Make ``get`` return ``template`` for its model type."""
        if not isinstance(template, LLMTemplate):
            raise TypeError(f"a template is an LLMTemplate, not {type(template).__name__}")
        cls.registry[template.model_type] = template

    @staticmethod
    def register_scheme(scheme_name: str, config: QLayerConfig) -> None:
        """Make ``scheme_name`` a scheme."""
        schemes.register_scheme(scheme_name, config)

    @staticmethod
    def unregister_scheme(scheme_name: str) -> None:
        """Forget a scheme that was registered."""
        schemes.unregister_scheme(scheme_name)

    @staticmethod
    def get_supported_schemes() -> list[str]:
        """Every scheme."""
        return schemes.scheme_names()

    def get_config(
        self,
        scheme: str,
        algorithm: str | Sequence[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: Mapping[str, str] | None = None,
        layer_type_config: Mapping[type[nn.Module], str] | None = None,
        exclude_layers: Sequence[str] | None = None,
        algo_configs: Mapping[str, Any] | None = None,
        shared_scale_groups: Sequence[Sequence[str]] | None = None,
    ) -> QConfig:
        """The configuration of this kind of model.

        Args:
            scheme: of all layers; ``get_supported_schemes`` lists them.
            algorithm: name or names of algorithms, in order.
            kv_cache_scheme: of keys and values: fp8, fp8_per_head, int8, int8_per_token, int4_per_token,
                int4_per_channel.
            min_kv_scale: least static scale of keys and values.
            attention_scheme: "fp8" quantizes queries and attention probabilities; needs eager attention.
            layer_config: scheme by name or glob of layers.
            layer_type_config: scheme by class of layers.
            exclude_layers: names and globs that stay float, in the place of the template's; [] excludes nothing.
            algo_configs: settings by algorithm, in the place of the template's.
            shared_scale_groups: names of siblings that share a tensor scale; None: what the scheme wants.

        Raises:
            ConfigError: an unknown name, or something this template does not know.
        """
        config = QConfig(
            schemes.scheme(scheme),
            exclude=[Usual(name) for name in self.exclude_layers_name] if exclude_layers is None else [*exclude_layers],
            algo_config=self.algorithms(algorithm, algo_configs or {}),
            layer_quant_config={name: schemes.scheme(value) for name, value in (layer_config or {}).items()},
            layer_type_quant_config={key: schemes.scheme(value) for key, value in (layer_type_config or {}).items()},
            shared_scale_groups=self.siblings(scheme, shared_scale_groups),
            sync_moe_expert_input_amax=scheme in schemes.TWO_LEVEL,
            softmax_quant_spec=self.attention(attention_scheme),
            **self.cache(kv_cache_scheme, min_kv_scale),
        )
        if attention_scheme:
            self.add_queries(config)
        return config

    def cache(self, name: str | None, min_kv_scale: float) -> dict[str, Any]:
        """The fields of the attention cache."""
        if name is None:
            return {"min_kv_scale": min_kv_scale}
        keys, values = schemes.cache_scheme(name)
        if not self.kv_layers_name:
            raise ConfigError(f"kv_cache_scheme: the template {self.model_type!r} has no kv_layers_name")
        made = {glob: role_of(glob.lstrip("*")) for glob in self.kv_layers_name}
        fused = any(len(roles) > 1 for roles in made.values())
        if fused and keys != values:
            raise ConfigError(f"kv_cache_scheme {name!r} treats keys and values differently, and one layer makes both")
        return {
            "kv_cache_quant_config": {glob: values if roles == ("v",) else keys for glob, roles in made.items()},
            "kv_cache_group": list(self.kv_layers_name) if name in schemes.SHARED_SCALE else [],
            "min_kv_scale": min_kv_scale,
            "kv_cache_per_head": name in schemes.PER_HEAD,
            "kv_cache_post_rope": fused,
        }

    @staticmethod
    def attention(name: str | None) -> QTensorConfig | None:
        """The type of attention probabilities."""
        if name not in (None, "fp8"):
            raise ConfigError(unknown("attention scheme", name, ["fp8"]))
        return FP8E4M3PerTensorSpec(scale_type="float").to_quantization_spec() if name else None

    def add_queries(self, config: QConfig) -> None:
        """Quantize queries, as the outputs of the layers that make them."""
        globs = [self.q_layer_name] if isinstance(self.q_layer_name, str) else self.q_layer_name or []
        spec = FP8E4M3PerTensorSpec(scale_type="float").to_quantization_spec()
        base = config.global_quant_config
        for glob in globs:
            if role_of(glob.lstrip("*")):
                raise ConfigError(
                    f"attention_scheme: {glob!r} makes queries, keys and values in one; it is not available"
                )
            found = config.layer_quant_config.get(glob, base)
            config.layer_quant_config[glob] = QLayerConfig(found.input_tensors, spec, found.weight, found.bias)

    def siblings(self, scheme: str, given: Sequence[Sequence[str]] | None) -> list[list[str]]:
        """Names of layers that share a tensor scale."""
        if given is not None or scheme not in schemes.TWO_LEVEL:
            return [list(group) for group in given or ()]
        return [[Usual(name) for name in group] for group in self.read_together() if len(group) > 1]

    def read_together(self) -> list[list[str]]:
        """Globs of siblings that kernels read as one layer: queries, keys and values; gate and up."""
        queries = [self.q_layer_name] if isinstance(self.q_layer_name, str) else list(self.q_layer_name or [])
        attention = list(dict.fromkeys([*queries, *(self.kv_layers_name or [])]))  # one name where a layer makes all
        return [attention, list(self.gate_up_layers_name or [])]

    def algorithms(self, names: str | Sequence[str] | None, given: Mapping[str, Any]) -> list[Any] | None:
        """Settings of the algorithms called ``names``."""
        if not names:
            return None
        return [self.algorithm(name, given) for name in ([names] if isinstance(names, str) else names)]

    def algorithm(self, name: str, given: Mapping[str, Any]) -> Any:
        """Settings of one algorithm: those given, those of this template, or its defaults."""
        chosen = given.get(name) or (self.algorithm_configs or {}).get(name)
        known = TORCH.get(name, name)
        if chosen is None and known not in AlgoConfig.registry:
            raise ConfigError(unknown("algorithm", name, [*AlgoConfig.registry, *TORCH]))
        return AlgoConfig.registry[known]() if chosen is None else chosen


def of_row(row: LLMTemplate, told: ModuleFacts, model: nn.Module) -> LLMTemplate:
    """A template of the table for one model: patterns that fit none of its layers are those that its modules tell."""
    layers = [name for name, module in model.named_modules() if kind_of(module) is not None]
    queries = [row.q_layer_name] if isinstance(row.q_layer_name, str) else row.q_layer_name or []
    cached = all(known(glob, layers) and not in_towers(glob, model) for glob in row.kv_layers_name or ())
    floats = [name for name in told.floats if not fits(name, row.exclude_layers_name, layers)]
    return replace(
        row,
        kv_layers_name=row.kv_layers_name if cached else told.kv,
        q_layer_name=row.q_layer_name if all(known(glob, layers) for glob in queries) else told.q,
        exclude_layers_name=[*row.exclude_layers_name, *floats],
    )


def known(glob: str, layers: Iterable[str]) -> bool:
    """Whether a glob fits a layer."""
    return any(fnmatchcase(name, glob) for name in layers)


def fits(glob: str, rows: Iterable[str], layers: Iterable[str]) -> bool:
    """Whether every layer that ``glob`` fits is one that a row fits."""
    return all(any(fnmatchcase(name, row) for row in rows) for name in layers if fnmatchcase(name, glob))
