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

from quark.algorithms.adaround import Adam
from quark.algorithms.reconstruction import (
    Data,
    Settings,
    Stopper,
    Tensor,
    Trained,
    TrainedLayer,
    as_tensor,
    import_torch,
)
from quark.algorithms.training import Training

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
    training = Training(torch, layer, data, settings, SHARE)
    weight = as_tensor(torch, layer.weight.copy()).to(settings.device)
    bias = None if layer.bias is None else as_tensor(torch, layer.bias.copy()).to(settings.device)
    keep_bias = round_bias or (lambda tensor: tensor)

    def error() -> float:
        with torch.no_grad():
            return training.error(round_weight(weight), None if bias is None else keep_bias(bias))

    before = error()
    trained = [weight, *([bias] if bias is not None and settings.update_bias else [])]
    steps = _train(training, trained, (weight, bias), (round_weight, keep_bias), before)
    after = error()
    return training.settled(before, after, steps, weight.cpu().numpy(), None if bias is None else bias.cpu().numpy())


def _train(
    training: Training,
    trained: list[Tensor],
    parameters: tuple[Tensor, Tensor | None],
    rounds: tuple[Round, Round],
    before: float,
) -> int:
    torch, settings, pull, rate = training.torch, training.settings, training.pull, training.rate(before)
    adams, stop = [Adam(torch, tensor, rate) for tensor in trained], Stopper(settings)
    for step, batch in training.steps():
        leaves = [
            None if tensor is None else round_it(tensor).detach().requires_grad_()
            for tensor, round_it in zip(parameters, rounds, strict=True)
        ]
        with torch.enable_grad():
            loss = training.loss(batch, *leaves)
            gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None][: len(trained)])
        with torch.no_grad():
            if pull is not None:
                gradients = (pull.mixed(gradients[0], trained[0]), *gradients[1:])
            for adam, gradient in zip(adams, gradients, strict=True):
                adam.step(gradient.contiguous(), 1 - (step - 1) / settings.iterations)
        training.log(step, loss.detach())
        if stop.ends(loss.detach()):
            return step
    return settings.iterations
