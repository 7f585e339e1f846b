"""What stands on a page: models side by side, their layers and tensors, outputs before and after, tables, plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from quark.dataclass import dataclass
from quark.report.values import Example, LayerView, Links, Scatter, Table, TensorView
from quark.report.verdict import Verdict


@dataclass(frozen=True)
class ModelView:
    """One quantized model, or one data type that layers were tried with.

    Attributes:
        name: what it is called.
        verdict: its lines; the figures of them stand on top of the page.
        layers: in the order of the graph.
        tensors: activations and weights, by the names they have in the float model.
        weights: name of the tensor that holds a layer's weight, by the layer's name.
        reasons: why layers and tensors are what they are, by name.
    """

    name: str
    verdict: Verdict = field(default_factory=lambda: Verdict(()))
    layers: tuple[LayerView, ...] = ()
    tensors: tuple[TensorView, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """What ``Layer.alone`` is: its name and unit, and whether more of it is better."""

    name: str = "SQNR"
    unit: str = "dB"
    more: bool = True


@dataclass(frozen=True)
class Report:
    """Everything on one page.

    Attributes:
        title: the headline.
        models: side by side.
        links: the neighbours of layers, by the tensor that a layer makes.
        examples: outputs before and after.
        tables: below, folded.
        scatters: models by cost and gain.
        notes: how the figures of the layers were measured.
        measure: what the layers lose alone is measured in.
        verdict: about what the page as a whole tells of, where that is none of the models.
    """

    title: str
    models: tuple[ModelView, ...] = ()
    links: Mapping[str, Links] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    tables: tuple[Table, ...] = ()
    scatters: tuple[Scatter, ...] = ()
    notes: tuple[str, ...] = ()
    measure: Measure = Measure()
    verdict: Verdict = field(default_factory=lambda: Verdict(()))
