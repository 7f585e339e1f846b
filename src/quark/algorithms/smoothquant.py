"""SmoothQuant: hand part of the range of the activations to the weights (Xiao et al. 2023).

    y = (x / s) (s W^T)        s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)

alpha = 0 leaves the activations flat up to the weights, 1 takes their whole range into the weights. Dividing by s is
free where it goes into what produces x (a norm, the rows of a linear layer).
"""

from __future__ import annotations

from quark.numerics.array import Array, Same, float32, namespace

SMALLEST_WEIGHT = 1e-5  # what a channel of zero weights counts as


def smoothing_scales(activation_max: Array, weight_max: Array, alpha: float, smallest: float = 1e-3) -> Same:
    """s per channel.

    Args:
        activation_max: largest magnitude of each input channel, [channels].
        weight_max: largest magnitude of what each channel is multiplied by, over all layers that read it, [channels].
        alpha: 0..1.
        smallest: lower bound of s; channels that were always 0 get 1.
    """
    xp = namespace(activation_max)
    x, w = float32(activation_max), xp.clip(float32(weight_max), SMALLEST_WEIGHT, None)
    s = xp.clip(x**alpha / w ** (1 - alpha), smallest, None)
    return xp.where(x > 0, s, xp.ones_like(s))


def shared_channels(values: Array, channels: Array, count: int) -> Same:
    """The largest of the values (positive, [n]) that share a channel, per channel; 1 for channels without values.

    With grouped queries several input channels of an output projection read one channel of the value projection, and
    so must share its scale.
    """
    xp = namespace(values)
    best = xp.ones_like(values)[:1].repeat(count) * 0
    if xp.__name__ == "numpy":
        xp.maximum.at(best, channels, values)
    else:
        best = best.scatter_reduce(0, channels, values, "amax")
    return xp.where(best > 0, best, xp.ones_like(best))
