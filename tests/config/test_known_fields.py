"""A field that a configuration does not have cannot be set on it: it would be read by nobody."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

import quark.onnx as onnx_flow
import quark.torch as torch_flow
from quark.errors import ConfigError
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
