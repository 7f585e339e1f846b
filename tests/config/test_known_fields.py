"""A field that a configuration does not have cannot be set on it: it would be read by nobody."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

import quark.onnx as onnx_flow
import quark.torch as torch_flow
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ConfigError
from quark.numerics.granularity import Channel, Group
from quark.torch.quantization.config import config as torch_config


def public_configurations() -> dict[str, Any]:
    """One of each public class of configurations and specs that can be made without arguments."""
    found = {"Config": onnx_flow.Config(onnx_flow.get_default_config("XINT8"))}
    for space in (onnx_flow, torch_flow, torch_config):
        for name in sorted(vars(space)):
            kind = getattr(space, name)
            if isinstance(kind, type) and name.endswith(("Config", "Spec", "Scheme")):
                try:
                    found[f"{space.__name__}.{name}"] = kind()
                except (TypeError, ConfigError):  # it needs arguments
                    continue
    layer = torch_config.QLayerConfig(weight=torch_config.Int8PerTensorSpec().to_quantization_spec())
    return {**found, "torch QConfig": torch_config.QConfig(layer), "torch tensor": layer.weight}


MADE = public_configurations()


def test_there_are_many() -> None:
    assert len(MADE) > 50


@pytest.mark.parametrize("name", MADE)
def test_no_other_field_can_be_set(name: str) -> None:
    with pytest.raises((ConfigError, dataclasses.FrozenInstanceError)):
        MADE[name].exlude = ["head"]
    assert not hasattr(MADE[name], "exlude")


@pytest.mark.parametrize("name", MADE)
def test_copies_stay_what_they_are(name: str) -> None:
    made = copy.deepcopy(MADE[name])
    assert type(made) is type(MADE[name]) and set(vars(made)) == set(vars(MADE[name]))


def test_the_nearest_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"field of QConfig.*exlude.*exclude"):
        onnx_flow.QConfig().exlude = ["head"]  # type: ignore[attr-defined]
    config = onnx_flow.QConfig()
    config.exclude = ["head"]
    assert config.exclude == ["head"]


def test_a_class_of_a_user_may_set_more_when_it_is_made() -> None:
    class Mine(onnx_flow.QConfig):
        def __init__(self, wish: str) -> None:
            super().__init__()
            self.noted = wish * 2

    made = Mine("a")
    made.noted = "b"
    assert made.noted == "b"
    with pytest.raises(ConfigError, match="field of Mine"):
        made.note = "c"  # type: ignore[attr-defined]


# ---- a configuration that was changed is checked as one that is made so ----------------------------------------------


def torch_job(change: Any) -> None:
    """A job under a configuration that changes after the quantizer has it; the model stays as it was."""
    weight = torch_config.Int4PerGroupSpec(ch_axis=-1, group_size=4).to_quantization_spec()
    layer = torch_config.QLayerConfig(weight=weight)
    config = torch_config.QConfig(layer, algo_config=[torch_config.GPTAQConfig()])
    quantizer, net = torch_flow.ModelQuantizer(config), torch.nn.Sequential(torch.nn.Linear(8, 8))
    change(config)
    try:
        quantizer.quantize_model(net, [torch.ones(2, 8)])
    finally:
        assert type(net[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: setattr(config.algo_config[0], "alpha", 5), "GPTAQConfig: alpha=5 must be between 0 and 1"),
        (lambda config: setattr(config.algo_config[0], "static_groups", False), "static_groups=False must be True"),
        (lambda config: setattr(config.algo_config[0], "name", "awq"), "name='awq' must be 'gptaq'"),
        (lambda config: setattr(config, "algo_config", ["gptq"]), "algo_config must be a list of algorithms"),
        (lambda config: setattr(config, "min_kv_scale", -1.0), "min_kv_scale must be a number of at least 0"),
        (lambda config: setattr(config, "min_kv_scale", "1"), "min_kv_scale must be a number of at least 0"),
        (lambda config: setattr(config, "quant_mode", "graph"), "quant_mode 'graph'"),
        (lambda config: setattr(config, "exclude", None), "exclude must be a list of layer names"),
        (lambda config: setattr(config, "layer_quant_config", ["0"]), "layer_quant_config must be a dictionary"),
        (
            lambda config: setattr(config, "kv_cache_per_head", "no"),
            "kv_cache_per_head must be True or False, not 'no'",
        ),
        (lambda config: setattr(config.global_quant_config, "weight", "int4"), "weight must be a QTensorConfig"),
        (
            lambda config: setattr(config.global_quant_config.weight, "symmetric", "no"),
            "symmetric must be True or False",
        ),
        (lambda config: setattr(config.global_quant_config.weight, "group_size", "x"), "group_size must be a positive"),
        (
            lambda config: setattr(config.global_quant_config.weight, "is_scale_quant", "no"),
            "is_scale_quant must be True",
        ),
    ],
)
def test_a_torch_configuration_that_was_changed_is_checked_before_any_work(change: Any, words: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=words):
        torch_job(change)


def test_a_file_may_leave_a_switch_open() -> None:
    weight = torch_config.Int4PerGroupSpec(ch_axis=-1, group_size=4).to_quantization_spec()
    told = torch_config.QConfig(torch_config.QLayerConfig(weight=weight)).to_dict()
    told |= {"kv_cache_post_rope": None}
    told["global_quant_config"]["weight"]["is_scale_quant"] = None
    read = torch_config.QConfig.from_dict(told)
    assert (read.kv_cache_post_rope, read.global_quant_config.weight.is_scale_quant) == (False, None)  # type: ignore[union-attr]


def test_a_mode_that_is_set_by_name_is_the_mode() -> None:
    config = torch_config.QConfig(torch_config.QLayerConfig())
    config.quant_mode = "fx_graph_mode"  # type: ignore[assignment]
    assert config.quant_mode is torch_config.QConfig(torch_config.QLayerConfig(), quant_mode="fx_graph_mode").quant_mode  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: setattr(config.global_config, "weight", 3), "the field weight must be a spec"),
        (lambda config: setattr(config.global_config.weight, "symmetric", "no"), "symmetric must be True or False"),
        (
            lambda config: setattr(config.global_config.weight, "data_type", "int8"),
            "data_type must be a data type class",
        ),
        (lambda config: setattr(config.global_config.weight, "quant_granularity", "x"), "quant_granularity 'x'"),
        (lambda config: setattr(config.global_config.weight, "group_size", -3), "group_size must be a positive"),
        (lambda config: setattr(config, "use_external_data_format", "no"), "must be True or False, not 'no'"),
        (lambda config: setattr(config, "use_dynamic_quant", "no"), "use_dynamic_quant must be True or False"),
    ],
)
def test_an_onnx_configuration_that_was_changed_is_checked(change: Any, words: str) -> None:
    config = onnx_flow.QConfig()
    with pytest.raises(ConfigError, match=words):
        change(config)
        config.compile()


def preset(**changes: Any) -> Any:
    """What a preset with changed fields compiles to."""
    config = onnx_flow.Config(onnx_flow.get_default_config("XINT8"))
    for name, value in changes.items():
        setattr(config.global_quant_config, name, value)
    return config.compile()


@pytest.mark.parametrize("name", ["include_cle", "enable_npu_transformer", "use_external_data_format"])
def test_a_switch_of_a_preset_is_no_word(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be True or False, not 'no'"):
        preset(**{name: "no"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((partial(TensorSpec, **{name: "no"}), f"{name} must be True or False") for name in ("symmetric", "dynamic")),
        (partial(TensorSpec, granularity="tensor"), r"granularity of a TensorSpec must be Tensor\(\)"),
        (partial(TensorSpec, settings={"share": 1}), "settings of a TensorSpec must be a tuple"),
        (partial(TensorSpec, second="int4"), "second of a TensorSpec must be a TensorSpec or None"),
        (partial(LayerSpec, TensorSpec(), "int8"), "weight of a LayerSpec must be a TensorSpec or None, not 'int8'"),
        (partial(Channel, 1.5), "axis of a granularity must be an integer, not 1.5"),
        (partial(Group, True, 32), "axis of a granularity must be an integer, not True"),
        (partial(Group, 0, 2.5), "size of a granularity must be an integer, not 2.5"),
        (partial(preset, layer="int8"), "the field layer must be a LayerSpec, not 'int8'"),
        (partial(preset, layers={"conv": 8}), "layers: 'conv' must have a LayerSpec or None, not 8"),
    ],
)
def test_the_one_language_takes_values_only(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
