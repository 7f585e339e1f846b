"""What each layer loses, by one backward pass in the place of one trial per layer and candidate.

    backward   once per sample: g = ∂(v · outputs) / ∂y at the output y of every layer. For a divergence v is what a
               token drawn from the model's own distribution p leaves of p, so that E v vᵀ is the curvature of the
               divergence; for a ratio of energies v is +1 or -1
    local      once per candidate and sample: δ, what quantizing one layer alone changes at its output, all layers in
               one pass, since each reads what the float model gives it
    loss       KL: ½ Σ (g · δ)² per token, and the same without ½ over the energy of each output; the products of
               different tokens are left out

This is the curvature along the error that is really made: the first order (g · δ) squared, so no Hessian has to be
formed. Not handled: errors so large that the outputs no longer follow them in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from quark.files.atomic import part_of
from quark.torch.algorithms.blocks import first, hooked
from quark.torch.calibration import run
from quark.torch.config.model import QConfig
from quark.torch.layer_runs import FIRST, FloatOutputs, TorchLayerRuns, open_runs, running
from quark.torch.outputs import answer_tensors
from quark.torch.structure import run_model

SEEN = 4
"""Samples that are looked at, at most."""
Losses = dict[tuple[str, str], float]


def losses(
    model: nn.Module,
    common: FloatOutputs,
    configs: Mapping[str, QConfig],
    layers: Mapping[str, Sequence[str]],
    metric: str,
) -> Losses:
    """The estimated loss of every layer under every candidate.

    Args:
        model: the float model; it is left as it was.
        common: samples and float outputs.
        configs: of the candidates.
        layers: names of the layers that a candidate quantizes.
        metric: ``kl``; anything else is the noise over the signal.
    """
    names = list(dict.fromkeys(name for found in layers.values() for name in found))
    samples = range(min(SEEN, len(common.samples)))
    kl = metric == "kl"
    shares = shares_of(common, samples, kl)
    scale = sum(followed(model, common, k, names, shares, kl) for k in samples)
    found: Losses = {}
    for candidate, config in configs.items():
        runs = open_runs(model, config, common)
        try:
            sums = dict.fromkeys(layers[candidate], 0.0)
            for k in samples:
                for name, value in products(runs, k, layers[candidate]):
                    sums[name] += value
        finally:
            runs.undo.close()
        found |= {(name, candidate): (0.5 if kl else 1.0) * value / max(scale, 1e-30) for name, value in sums.items()}
    return found


def runs(samples: int, candidates: int) -> int:
    """Runs of the model that ``losses`` takes: a backward pass counts as three, a pass in which every layer computes
    twice as two."""
    return min(SEEN, samples) * (3 + 2 * candidates)


def shares_of(common: FloatOutputs, samples: Sequence[int], kl: bool) -> dict[str, float]:
    """What an output's errors are multiplied by, so that the energy of the first stands for each: sqrt(E₀ / E).

    Of a divergence, which is that of the first output: 1 for it alone. The first of all counts that is not zeros.
    """
    if kl:
        return {FIRST: 1.0}
    energies = dict.fromkeys(common.reference(samples[0]), 0.0)
    for k in samples:
        for name, values in common.reference(k).items():
            energies[name] += float((values.double() ** 2).sum())
    first_energy = next((one for one in energies.values() if one), 0.0)
    return {name: (first_energy / one) ** 0.5 for name, one in energies.items() if one} or {FIRST: 1.0}


def followed(
    model: nn.Module, common: FloatOutputs, k: int, names: Sequence[str], shares: Mapping[str, float], kl: bool
) -> float:
    """Write the gradients at the layers for sample ``k``; the positions of its first output, or its energy."""
    leaves: dict[str, torch.Tensor] = {}

    def open_up(name: str) -> Callable[..., Any]:
        def _hook(module: nn.Module, args: Any, output: Any) -> Any:
            value = first(output)
            leaf = torch.zeros_like(value, requires_grad=True)
            leaves[f"{name}:{sum(key.rpartition(':')[0] == name for key in leaves)}"] = leaf
            return value + leaf if isinstance(output, torch.Tensor) else (value + leaf, *output[1:])

        return _hook

    hooks = {name: open_up(name) for name in names}
    with running(model), fixed(model), hooked(model, hooks), torch.enable_grad():
        outputs = _outputs(model, common.samples[k], shares)
        parts = [(_direction(one, kl, k + SEEN * n) * one).sum() for n, one in enumerate(outputs.values())]
        found = torch.autograd.grad(sum(parts[1:], parts[0]), list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    kept = {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}
    path = _gradients(common, k)
    with part_of(path, SafetensorError) as part:
        save_file({name: grad.float().cpu().contiguous() for name, grad in kept.items()}, part)
    one = next(iter(outputs.values())).detach()
    return float(one.numel() // one.shape[-1]) if kl else float((one.double() ** 2).sum())


def _outputs(model: nn.Module, sample: Any, shares: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """The outputs that count, each times its share, with their gradients."""
    found = {f"output {number}": one for number, one in enumerate(answer_tensors(run_model(model, sample)))}
    return {
        name: (found[name] if found[name].dim() else found[name].reshape(1)) * share for name, share in shares.items()
    }


def _direction(outputs: torch.Tensor, kl: bool, seed: int) -> torch.Tensor:
    """What the outputs are multiplied by: p - (a token drawn from p), or signs."""
    generator = torch.Generator().manual_seed(seed)
    values = outputs.detach().float().cpu()
    if not kl:
        signs = torch.randint(0, 2, values.shape, generator=generator).float() * 2 - 1
        return signs.to(outputs.device, outputs.dtype)
    p = values.reshape(-1, values.shape[-1]).softmax(-1)
    drawn = torch.multinomial(p, 1, generator=generator)
    return (p - torch.zeros_like(p).scatter_(1, drawn, 1.0)).reshape(values.shape).to(outputs.device, outputs.dtype)


def products(runs: TorchLayerRuns, k: int, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """For every layer that sample ``k`` reaches: Σ over tokens (g · δ)²."""
    found: list[tuple[str, float]] = []
    calls: dict[str, int] = {}
    with safe_open(_gradients(runs.common, k), framework="pt") as gradients:

        def look(name: str) -> Callable[..., Any]:
            layer = runs.layers[name]

            def _hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                number = calls[name] = calls.get(name, -1) + 1
                with runs.quantized(name):
                    changed = first(layer.forward(*args, **kwargs))
                delta = (changed - first(output)).float().cpu()
                product = (gradients.get_tensor(f"{name}:{number}") * delta).sum(-1)
                found.append((name, float((product.double() ** 2).sum())))

            return _hook

        with running(runs.model), hooked(runs.model, {name: look(name) for name in names}, True):
            run(runs.model, runs.common.samples[k])
    yield from found


@contextmanager
def fixed(model: nn.Module) -> Iterator[None]:
    """No gradients of parameters."""
    learned = [one for one in model.parameters() if one.requires_grad]
    for one in learned:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in learned:
            one.requires_grad_(True)


def _gradients(common: FloatOutputs, k: int) -> Path:
    return common.folder / f"gradients{k}.safetensors"
