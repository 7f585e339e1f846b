"""What a layer's few samples leave open is decided as rounding to nearest would: a pull towards the float weights.

    minimize  (1 − a) · error(W̃)  +  a · Σ D (W̃ − W)²        D: mean square of the input that a weight multiplies
    a = d² / (N² + d²)                                        N positions seen, d inputs of an output

Fewer positions than inputs can be answered exactly by roundings that mean nothing on other data. The second term is
the error of a layer whose inputs do not depend on each other, the usual target where a covariance is known badly
(Schäfer and Strimmer 2005, "A Shrinkage Approach to Large-Scale Covariance Matrix Estimation", target "diagonal,
unequal variance"). Their share a needs the Gram matrix; this one needs two numbers, and was chosen by what it does on
held-out data (``docs/results/accuracy.md``, Few samples). It vanishes as the square of d / N.

W̃ is what is trained: the soft rounding of AdaRound, the float weight of AdaQuant before its rounding. Of the rounded
weight the term would be of no use there: straight through, its gradient drives a weight away from its nearest code and
back again, and where the last step leaves it is chance.

Not handled: layers that are not linear in their weights (norms), which have as many weights as inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.algorithms.reconstruction import Data, Tensor, TrainedLayer, as_tensor
from quark.dataclass import dataclass
from quark.errors import known

#: A smaller share is not worth its time.
LEAST = 0.02


@dataclass(frozen=True)
class Pull:
    """The second term for one layer; tensors broadcast against the weight, on the device that trains.

    Attributes:
        share: a.
        force: 2 a D.
        rest: 2 a D W.
    """

    share: float
    force: Tensor
    rest: Tensor

    def mixed(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient of both terms at ``weight``, from that of the first, which is used up."""
        return gradient.mul_(1 - self.share).sub_(self.rest).addcmul_(weight, self.force)


def pull_of(torch: Any, layer: TrainedLayer, data: Data, device: str, floor: float = 0.0) -> Pull | None:
    """The term for a layer and its samples; ``None`` where the samples are many, or the layer is not linear.

    Args:
        floor: the share is no smaller, however many samples there are.
    """
    if layer.linear is None:
        return None
    channels = data.targets[0].shape[layer.channel_axis]
    positions = sum(target.size for target in data.targets) / channels
    inputs = layer.weight.size / channels
    share = max(inputs**2 / (positions**2 + inputs**2), floor)
    if share < LEAST:
        return None
    force = _once(torch, _squares(torch, layer, data, device)).mul_(2 * share / positions)
    return Pull(share, force, force * as_tensor(torch, layer.weight).to(device))


def _squares(torch: Any, layer: TrainedLayer, data: Data, device: str) -> Tensor:
    """[weight]: Σ over positions of the squared input that each weight multiplies.

    It is the derivative, by the weights, of the sum of what the layer makes of squared inputs.
    """
    sums: dict[tuple[int, ...], np.ndarray] = {}
    for array in data.inputs:
        square = np.square(array, dtype=np.float32)
        sums[array.shape] = sums[array.shape] + square if array.shape in sums else square
    weight = torch.ones(layer.weight.shape, device=device, requires_grad=True)
    total, linear = None, known(layer.linear, "what a layer computes without its activation function")
    for array in sums.values():
        with torch.enable_grad():
            found = linear(as_tensor(torch, array).to(device), weight, None).sum()
            part = torch.autograd.grad(found, weight)[0]
        total = part.contiguous() if total is None else total.add_(part)
    return total


def _once(torch: Any, values: Tensor) -> Tensor:
    """What is the same for all outputs, as it is without groups, once: memory of a weight less."""
    for axis in (0, 1):
        first = values.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(values), values):
            return first.clone()
    return values
