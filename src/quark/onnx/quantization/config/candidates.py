"""What a single layer may become, by name: a preset, ``float``, or ``ACTIVATION[:METHOD]/WEIGHT[@SCALES]``.

    A16W8            the activations and weights of that preset; its options and algorithms are those of the whole job
    uint8/int4       data types of ``quark.numerics.formats``; types below 8 bits have a scale per channel, others one
    uint8/int4@32    a scale for every 32 elements along the axis that is summed; also @channel and @tensor
    float/int4@32    weights only
    uint8:mse/int4   the range of activations by that method of ``quark.observers.SEARCHES``; also A16W8:percentile

Without a method, a preset has its own, and types are calibrated by their extremes. Signed types are symmetric, unsigned
activations have a zero point.
"""

from __future__ import annotations

from dataclasses import replace

from quark.config.presets import PRESETS, get_preset
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ConfigError, nearest, unknown
from quark.numerics.formats import FORMATS, Block, Int, get_format
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.observers import SEARCHES

FLOAT = "float"
#: Integers of fewer bits get a scale per channel when nothing is said.
_COARSE_BITS = 8


def candidate(name: str) -> LayerSpec | None:
    """The specs that a name stands for; ``None`` for ``float``.

    Raises:
        ConfigError: no such preset, data type or method, or scales that the type does not have.
    """
    if name == FLOAT:
        return None
    first, _, rest = name.partition("/")
    activation, _, method = first.partition(":")
    if not rest:
        found = _of_preset(activation)
        inputs = None if found.inputs is None else _calibrated(found.inputs, method, name)
        return replace(found, inputs=inputs, outputs=inputs)
    weight, _, scales = rest.partition("@")
    inputs = None if activation == FLOAT else _calibrated(_activation(activation, name), method, name)
    if inputs is None and method:
        raise ConfigError(f"the candidate {name!r}: float activations have no range that {method!r} could find")
    return LayerSpec(inputs, _weight(weight, scales, name), None, inputs)


def _calibrated(spec: TensorSpec, method: str, whole: str) -> TensorSpec:
    if not method:
        return spec
    if method not in SEARCHES:
        raise ConfigError(f"the candidate {whole!r}: {unknown('calibration method', method, SEARCHES)}")
    return replace(spec, method=method, settings=())


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


def _format(name: str, whole: str) -> str:
    if name not in FORMATS:
        raise ConfigError(f"the candidate {whole!r}: {unknown('data type', name, FORMATS)}")
    return name


def _activation(name: str, whole: str) -> TensorSpec:
    return TensorSpec(_format(name, whole), symmetric=not name.startswith("uint"))


def _weight(name: str, scales: str, whole: str) -> TensorSpec:
    row = get_format(_format(name, whole))
    if isinstance(row, Block):
        if scales:
            raise ConfigError(f"the candidate {whole!r}: blocks of {name} bring their own scales; leave @{scales} out")
        return TensorSpec(name)
    if not scales:
        scales = "channel" if isinstance(row, Int) and row.bits < _COARSE_BITS else "tensor"
    return TensorSpec(name, symmetric=True, granularity=_granularity(scales, whole))


def _granularity(scales: str, whole: str) -> Granularity:
    known: dict[str, Granularity] = {"tensor": Tensor(), "channel": Channel(-1)}
    if scales in known:
        return known[scales]
    if scales.isdigit() and int(scales) > 0:
        return Group(-1, int(scales))
    raise ConfigError(f"the candidate {whole!r}: {unknown('scales', scales, [*known, '32 (elements per scale)'])}")
