"""What the registry knows of a graph pass: name, sentence, parameters.

A pass is a function ``run(model, parameter=default, …) -> PassReport`` that edits an ``onnx_ir.Model`` in place.
Parameters describe themselves: ``epsilon: Annotated[float, "what it is"] = 1e-5``.
Every pass also takes a switch that has its own name (``fold_batch_norm: {fold_batch_norm: false}``): a pass that is
listed runs unless its switch is false.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from quark.config.typed import Misfit, typed
from quark.dataclass import dataclass
from quark.errors import ConfigError, unknown
from quark.onnx.graph.report import PassReport

Run = Callable[..., PassReport]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a pass."""

    name: str
    kind: Any
    default: Any
    doc: str

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    def parse(self, value: Any, owner: str) -> Any:
        """The value in its type.

        Raises:
            ConfigError: it is of another type.
        """
        try:
            return typed(value, self.kind)
        except Misfit as error:
            raise ConfigError(
                f"the parameter {self.name!r} of the pass {owner!r} cannot be {value!r}: {error.reason}"
            ) from None


@dataclass(frozen=True)
class Pass:
    """One row of the registry.

    Attributes:
        name: how configurations name it.
        doc: one sentence.
        run: the function.
        shapes: whether it reads shapes, which are inferred for it first.
        when: operators without any of which it has nothing to do; empty for any graph.
        changes: what it changes besides the graph, in words; empty where the model's outputs stay what they were.
    """

    name: str
    doc: str
    run: Run
    shapes: bool = False
    when: tuple[str, ...] = ()
    changes: str = ""

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """What ``run`` takes besides the model."""
        hints = get_type_hints(inspect.unwrap(self.run), include_extras=True)
        named = list(inspect.signature(self.run).parameters.values())[1:]
        return {one.name: _parameter(one, hints.get(one.name, Any)) for one in named}

    def arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Parsed arguments of ``run``; ``None`` where the pass is switched off.

        Raises:
            ConfigError: a parameter that it does not have or needs, or a value of another type.
        """
        given = dict(given or {})
        switch = self.name
        if given.get(switch, True) is False:
            return None
        if switch not in self.parameters and switch in given:
            Parameter(switch, bool, True, "").parse(given.pop(switch), self.name)
        for name in given:
            if name not in self.parameters:
                raise ConfigError(unknown(f"parameter of the pass {self.name!r}:", name, [switch, *self.parameters]))
        missing = [name for name, one in self.parameters.items() if one.required and name not in given]
        if missing:
            raise ConfigError(f"the pass {self.name!r} needs the parameter {missing[0]!r}")
        return {name: self.parameters[name].parse(value, self.name) for name, value in given.items()}


def _parameter(one: inspect.Parameter, hint: Any) -> Parameter:
    if get_origin(hint) is Annotated:
        kind, doc = get_args(hint)[:2]
        return Parameter(one.name, kind, one.default, str(doc))
    return Parameter(one.name, hint, one.default, "")
