"""AdaQuant: train the weights of one layer through its quantizer, so that it answers as the float layer did.

    minimize  ‖ f(W x + b) − f(Q(W + ΔW) x̂ + Q(b + Δb)) ‖²        with dQ/dW = 1 (straight through)

The rate of Adam falls along a line to zero: at a constant one weights near a rounding boundary go to and fro, and where
the last step leaves them is chance. Scales stay what they are; any format that can be rounded to can be trained, block
formats included. The few samples of a wide layer do not decide alone (``shrinkage.py``).

Source: Hubara et al. 2020, "Improving Post Training Neural Quantization: Layer-wise Calibration and Integer
Programming", section 3 (here with fixed scales).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.algorithms.adaround import Adam
from quark.algorithms.reconstruction import (
    Batches,
    Data,
    Settings,
    Stopper,
    Tensor,
    Trained,
    TrainedLayer,
    as_tensor,
    check_device,
    import_torch,
    learning_rate,
    log_step,
    mean_error,
    reconstruction_error,
    settled,
)
from quark.algorithms.shrinkage import Pull, pull_of

#: Of the pull towards the float weights, at least: a weight that gains nothing by it does not drift over a boundary.
SHARE = 0.1
#: Rounds a tensor to its format, on its device.
Round = Callable[[Tensor], Tensor]


def adaquant(
    layer: TrainedLayer, round_weight: Round, round_bias: Round | None, data: Data, settings: Settings
) -> Trained:
    """Train one layer.

    Args:
        round_bias: ``None`` where the bias stays float.

    Returns:
        Float weights (and bias) whose rounding is what was trained.

    Raises:
        ConfigError: torch is not there, or not the device.
    """
    torch = import_torch("AdaQuant")
    check_device(torch, settings.device)
    weight = as_tensor(torch, layer.weight.copy()).to(settings.device)
    bias = None if layer.bias is None else as_tensor(torch, layer.bias.copy()).to(settings.device)
    keep_bias = round_bias or (lambda tensor: tensor)

    def error() -> float:
        with torch.no_grad():
            return mean_error(layer, batches, round_weight(weight), None if bias is None else keep_bias(bias))

    batches = Batches(torch, data, settings)
    before = error()
    trained = [weight, *([bias] if bias is not None and settings.update_bias else [])]
    pull = pull_of(torch, layer, data, settings.device, SHARE) if settings.shrinkage else None
    steps = _train(torch, layer, trained, (weight, bias), (round_weight, keep_bias), batches, settings, before, pull)
    after = error()
    return settled(layer, before, after, steps, weight.cpu().numpy(), None if bias is None else bias.cpu().numpy())


def _train(
    torch: Any,
    layer: TrainedLayer,
    trained: list[Tensor],
    parameters: tuple[Tensor, Tensor | None],
    rounds: tuple[Round, Round],
    batches: Batches,
    settings: Settings,
    before: float,
    pull: Pull | None,
) -> int:
    rate = learning_rate(settings, before)
    adams, stop = [Adam(torch, tensor, rate) for tensor in trained], Stopper(settings)
    for step, (inputs, target) in zip(range(1, settings.iterations + 1), batches.random(), strict=False):
        leaves = [
            None if tensor is None else round_it(tensor).detach().requires_grad_()
            for tensor, round_it in zip(parameters, rounds, strict=True)
        ]
        with torch.enable_grad():
            loss = reconstruction_error(layer.forward(inputs, *leaves), target, layer.channel_axis)
            gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None][: len(trained)])
        with torch.no_grad():
            if pull is not None:
                gradients = (pull.mixed(gradients[0], trained[0]), *gradients[1:])
            for adam, gradient in zip(adams, gradients, strict=True):
                adam.step(gradient.contiguous(), 1 - (step - 1) / settings.iterations)
        log_step(layer, settings, step, loss.detach())
        if stop.ends(loss.detach()):
            return step
    return settings.iterations
