"""What a single layer may become, by name: a preset, ``float``, or ``ACTIVATION[:METHOD]/WEIGHT[@SCALES]``.

    A16W8              the activations and weights of that preset; its options and algorithms are those of the whole job
    A16W8:percentile   the same with ranges of activations by that method of ``quark.observers.SEARCHES``
    uint8/int4@32      two data types (``quark.config.presets``); also float/int4@32: weights only

Without a method, a preset has its own.
"""

from __future__ import annotations

from dataclasses import replace

from quark.config.presets import FLOAT, PRESETS, calibrated, get_preset, layer_of_types
from quark.config.tensor import LayerSpec
from quark.errors import ConfigError, nearest


def candidate(name: str) -> LayerSpec | None:
    """The specs that a name stands for; ``None`` for ``float``.

    Raises:
        ConfigError: no such preset, data type or method, or scales that the type does not have.
    """
    if name == FLOAT:
        return None
    if "/" in name:
        return layer_of_types(name)
    preset, _, method = name.partition(":")
    found = _of_preset(preset)
    inputs = None if found.inputs is None else calibrated(found.inputs, method, f"the candidate {name!r}")
    return replace(found, inputs=inputs, outputs=inputs)


def _of_preset(name: str) -> LayerSpec:
    try:
        preset = get_preset(name)
    except ConfigError as error:
        near = nearest(name, [*PRESETS, FLOAT])
        raise ConfigError(
            f"the candidate {name!r} is not a preset.{near} A candidate is a preset, {FLOAT!r}, or two data types such "
            "as 'uint8/int4' or 'uint8/int4@32'"
        ) from error
    if preset.activation.dynamic or preset.options.get("UseMatMulNBits"):
        raise ConfigError(f"the candidate {name!r} quantizes a whole model in its own way, not single layers")
    return LayerSpec(preset.activation, preset.weight, None, preset.activation)
