"""What each layer loses, by a few passes in the place of one trial per layer and candidate.

    local     one pass per candidate and sample: the errors of all layers at their outputs, each alone
              (``quark.onnx.layer_errors``)
    injected  one run per layer of what lies behind it (``quark.onnx.injected``): the error of one candidate is added to
              what the float model has there; what arrives at the outputs is the loss of that layer under that
              candidate, without any approximation for this sample
    loss      of another candidate: the same, times the energy of its error over that of the injected one

So the loss is taken to be proportional to the energy of a layer's error; candidates whose errors have another direction
break this, and so do errors so large that a layer behind saturates. Where a plan rests on such an estimate, the error
of that candidate is followed too. The loss of few samples stands for all of them, corrected by the energy of the error
on all samples that it was seen on. Costs (bytes, bits) are exact.

Layers in bodies of If and Loop are tried one by one. Not handled: a metric of the user's own, which needs whole
models; all layers are tried one by one then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, replace

import numpy as np

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.measure.outputs import Outputs, loss_name
from quark.onnx.injected import Pair, Stretch, arriving, floats_of, stretches, write_errors, write_floats
from quark.onnx.layer_errors import local_errors, local_model
from quark.onnx.layer_runs import FloatModelFiles, OnnxLayerRuns
from quark.onnx.layer_units import Unit
from quark.search.refine import FEWER, Alone, affordable
from quark.search.trials import estimated, study
from quark.search.values import FLOAT, Study, Trial

FIRST = 0.85
"""The part of all runs that one candidate of every layer may take; the others are for what plans rest on."""


def planning(made: OnnxLayerRuns, metric: str) -> tuple[Study, Alone]:
    """The losses of layers, and who measures those that a plan rests on."""
    passes = Passes.over(made, metric, PLANNING)
    return passes.study(), Alone(passes.losses, passes.left)


@dataclass(frozen=True)
class Effort:
    """How much is run.

    Attributes:
        samples: those on which the errors of all candidates are compared, at least.
        fewer: how many times fewer runs than all trials everything takes.
    """

    samples: int
    fewer: int


RANKING = Effort(samples=2, fewer=FEWER)
#: Two samples do not stand for the frames of a sound (gtcrn: plans 2 to 8 dB worse than by all trials; 0 with eight).
PLANNING = Effort(samples=8, fewer=8)


@dataclass(frozen=True)
class Passes:
    """The errors of all layers, and what of them arrives at the outputs.

    Attributes:
        made: the layers of the main graph, the samples and the float outputs.
        inside: layers in bodies.
        names: the candidates.
        metric: a name in ``quark.search.trials.MEASURES``.
        stretches: where the layers are.
        chosen: samples, the loudest first, on which errors are compared.
        count: of them, those on which one candidate of every layer is followed.
        effort: how much is run.
        energies: of the errors, a sample each, by layer and candidate.
        sizes: bytes of the quantized constants.
        arrived: what arrived at the outputs on the first of the chosen samples, and of how many.
        tried: losses of layers in bodies.
        whole: candidates whose errors took the float model's run, too.
    """

    made: OnnxLayerRuns
    inside: tuple[Unit, ...]
    names: tuple[str, ...]
    metric: str
    stretches: tuple[Stretch, ...]
    chosen: tuple[int, ...]
    count: int
    effort: Effort
    energies: dict[Pair, list[float]] = field(default_factory=dict)
    sizes: dict[Pair, float] = field(default_factory=dict)
    arrived: dict[Pair, tuple[Outputs, int]] = field(default_factory=dict)
    tried: dict[Pair, float] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    @staticmethod
    def over(made: OnnxLayerRuns, metric: str, effort: Effort = RANKING) -> Passes:
        """With the errors of all layers, which take a few passes."""
        inside = tuple(unit for unit in made.layers if made.common.place(unit.name))
        made = replace(made, layers=tuple(unit for unit in made.layers if unit not in inside))
        found, order = stretches(made), loudest(made.common)
        empty = Passes(made, inside, made.names, metric, found, (), 0, effort)
        passes = replace(empty, chosen=tuple(order[: max(effort.samples, empty.follows())]), count=empty.follows())
        floats = floats_of(made, found)
        for number in passes.chosen if passes.stretches else ():
            write_floats(made.common, floats, number)
        for place, name in enumerate(passes.quantized if passes.stretches else ()):
            passes._look(place, name, set(floats))
        return passes

    def _look(self, place: int, name: str, floats: AbstractSet[str]) -> None:
        """The errors of all layers under one candidate."""
        local = local_model(self.made.common, self.made.layers, name, floats)
        self.whole.update({name} if not local.floats else ())
        self.sizes.update({(layer, name): size for layer, size in local.sizes.items()})
        for number, found in local_errors(self.made, local, name, self.chosen):
            for layer, arrays in found.items():
                self.energies.setdefault((layer, name), []).append(_energy(arrays))
            arrays = {key: array for errors in found.values() for key, array in errors.items()}
            write_errors(self.made.common, place, number, arrays)

    @property
    def quantized(self) -> tuple[str, ...]:
        """The candidates that quantize."""
        return tuple(name for name in self.names if name != FLOAT)

    # ---- how many runs -----------------------------------------------------------------------------------------------

    @property
    def pairs(self) -> int:
        """Layers times the candidates that quantize them."""
        return sum(name in unit.tensors for unit in self.made.layers for name in self.quantized)

    def all_runs(self) -> int:
        """Runs of the model that one trial per layer and candidate takes."""
        return self.made.common.samples * self.pairs

    def runs(self) -> float:
        """Those that were made; a run of a part of the model counts as its share of the multiplications."""
        share = {layer: stretch.share for stretch in self.stretches for layer in stretch.layers}
        return self._looked + sum(share[layer] * seen for (layer, _), (_, seen) in self.arrived.items())

    @property
    def _looked(self) -> int:
        return len(self.chosen) * (1 + len(self.quantized) + len(self.whole))

    def follows(self) -> int:
        """Samples on which one candidate of every layer is followed: as many as leave runs for what plans rest on, and
        one at least."""
        left = FIRST * self.all_runs() / self.effort.fewer - self.effort.samples * (1 + len(self.quantized))
        return max(1, min(int(left / max(self._every(), 1.0)), self.made.common.samples))

    def left(self, done: int) -> int:
        """Errors that may still be followed on all chosen samples, where so many were."""
        estimates = self._looked + self.count * self._every()
        measured = self.runs() - estimates
        allowed, pairs = self.all_runs() / self.effort.fewer, self.pairs // self.effort.fewer
        return affordable(allowed, estimates, measured, len(self.chosen), pairs, done)

    def _every(self) -> float:
        """Runs that following one candidate of every layer on one sample takes."""
        return sum(stretch.share * len(stretch.layers) for stretch in self.stretches)

    # ---- losses ------------------------------------------------------------------------------------------------------

    def study(self) -> Study:
        """The estimated loss of every layer under every candidate, with exact costs; layers in bodies are tried."""
        start = time.perf_counter()
        inner, units = replace(self.made, layers=self.inside), self.made.layers
        tried = study(inner, self.metric, Journal()).trials if self.inside else ()
        self.tried.update({(one.layer, one.candidate): one.loss for one in tried})
        told = {unit.name: _told(unit, self.quantized) for unit in units}
        self._follow([pair for pair in told.items() if pair[1] != FLOAT], self.count)
        found = [
            self._trial(unit, name, told[unit.name]) for unit in units for name in self.names if name in unit.tensors
        ]
        return Study((*found, *tried), self.metric, self.made.common.samples, time.perf_counter() - start)

    def _trial(self, unit: Unit, name: str, told: str) -> Trial:
        share = 0.0 if name == FLOAT else _ratio(self.seen((unit.name, name)), self.seen((unit.name, told)))
        loss = self._loss((unit.name, told)) * share if share else 0.0
        costs = {**unit.costs[name], **({} if name == FLOAT else {"size": self.sizes[unit.name, name]})}
        return Trial(unit.name, unit.kind, name, loss, estimated(loss, self.metric), costs)

    def seen(self, pair: Pair, count: int | None = None) -> float:
        """Mean energy of an error over the first of the chosen samples; over all of them."""
        return float(np.mean(self.energies[pair][:count]))

    def losses(self, pairs: Sequence[Pair]) -> list[float]:
        """What arrives of these errors at the outputs, each alone, on all chosen samples."""
        self._follow([pair for pair in pairs if pair not in self.tried], len(self.chosen))
        return [self.tried[pair] if pair in self.tried else self._loss(pair) for pair in pairs]

    def _loss(self, pair: Pair) -> float:
        outputs, count = self.arrived[pair]
        return outputs.metrics()[loss_name(self.metric)] * _ratio(self.seen(pair), self.seen(pair, count))

    def _follow(self, pairs: Sequence[Pair], count: int) -> None:
        """Let errors arrive at the outputs, on so many samples together with those on which they did before."""
        for stretch in self.stretches:
            left: dict[tuple[int, ...], dict[Pair, int]] = {}
            for pair in (pair for pair in pairs if pair[0] in stretch.layers):
                missing = self.chosen[self.arrived.get(pair, (None, 0))[1] : count]
                left.setdefault(missing, {})[pair] = self.quantized.index(pair[1])
            for numbers, wanted in ((numbers, wanted) for numbers, wanted in left.items() if numbers):
                into = {pair: self.arrived[pair][0] if pair in self.arrived else Outputs() for pair in wanted}
                arriving(self.made.common, stretch, wanted, numbers, self.metric == "kl", into)
                self.arrived.update({pair: (one, count) for pair, one in into.items()})


def loudest(common: FloatModelFiles) -> list[int]:
    """Samples by the energy of their float outputs, the largest first: they count most in a ratio of energies."""
    found = [_energy(common.reference(k)) for k in range(common.samples)]
    return sorted(range(len(found)), key=lambda k: -found[k])


def _told(unit: Unit, names: Sequence[str]) -> str:
    """The candidate whose error is followed: the middle one of those that fit, by what it reads."""
    fits = sorted((name for name in names if name in unit.tensors), key=lambda name: unit.costs[name]["bits"])
    return fits[len(fits) // 2] if fits else FLOAT


def _energy(arrays: Mapping[str, np.ndarray]) -> float:
    return float(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays.values()))


def _ratio(energy: float, followed: float) -> float:
    """Of an energy over that of an error that was followed."""
    return energy / followed if followed > 0 else float(energy > 0)
