"""A whole quantization job: what every dialect compiles to and the engine reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any, Literal

from quark.config.options import Options
from quark.config.plan import Plan
from quark.config.rules import Rule, Rules
from quark.config.tensor import LayerSpec, TensorSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError, check_name
from quark.numerics.elements import ELEMENTS

#: any: the layout that the configuration asks for. cpu: ONNX Runtime's integer kernels on x86 and Arm.
Target = Literal["any", "cpu"]
TARGETS: tuple[Target, ...] = ("any", "cpu")
#: Symmetric codes of the first are as well stored in the second.
SIGNED, UNSIGNED = ELEMENTS["int8"], ELEMENTS["uint8"]


@dataclass(frozen=True)
class Job:
    """Rules, options and the target of one quantization.

    Attributes:
        algorithms: configurations of the algorithms (``algo_config``), in the order in which they run.
        power_of_two: activations and weights have power-of-two scales.
        plan: the decisions in the place of those of rules and options; None: these decide.
        npu: the NPU flow (the same, unless ``EnableNPUCnn`` says no): biases and limits follow the device.
    """

    rules: Rules
    options: Options = field(default_factory=Options)
    target: Target = "any"
    external_data: bool = False
    algorithms: tuple[Any, ...] = ()
    plan: Plan | None = None

    def __post_init__(self) -> None:
        check_name("target", self.target, TARGETS)
        for option in ("UseMatMulNBits", "WeightsOnly"):
            if self._dynamic and getattr(self.options, option):
                raise ConfigError(f"{option} leaves activations in float; dynamic quantization is for activations, too")
        if self.options.EnableNPUCnn and not self.power_of_two:
            raise ConfigError("EnableNPUCnn is for power-of-two scales: use XInt8Spec for activations and weights")

    @property
    def mode(self) -> str:
        """A row of ``quark.onnx.qdq.modes.MODES``."""
        if self.options.UseMatMulNBits:
            return "nbits"
        return "dynamic" if self._dynamic else "static"

    @property
    def runs_samples(self) -> bool:
        """Whether samples run through the model: activations are quantized, by ranges that are fixed beforehand."""
        return self.mode == "static" and not self.options.WeightsOnly

    def ruled(self, rules: Iterable[Rule]) -> Job:
        """The job with more rules, to which its own are exceptions."""
        return replace(self, rules=replace(self.rules, rules=(*rules, *self.rules.rules)))

    def with_ranges(self, method: str, settings: tuple[tuple[str, Any], ...] = ()) -> Job:
        """The job whose activations get their ranges by another method, as of ``TensorSpec``."""

        def changed(layer: LayerSpec) -> LayerSpec:
            slots = {"inputs": layer.inputs, "outputs": layer.outputs}
            ranged = {name: spec for name, spec in slots.items() if spec is not None and spec.ranged}
            return replace(
                layer, **{name: replace(one, method=method, settings=settings) for name, one in ranged.items()}
            )

        rules = (rule if rule.layer is None else replace(rule, layer=changed(rule.layer)) for rule in self.rules.rules)
        return replace(self, rules=replace(self.rules, default=changed(self.rules.default), rules=tuple(rules)))

    @property
    def _dynamic(self) -> bool:
        return self.rules.default.inputs is not None and self.rules.default.inputs.dynamic

    @property
    def npu(self) -> bool:
        """Whether the model is made for the NPU's power-of-two arithmetic."""
        return self.power_of_two and self.options.EnableNPUCnn is not False

    @property
    def power_of_two(self) -> bool:
        """Whether both activations and weights have power-of-two scales."""
        layer = self.rules.default
        return all(spec is not None and spec.scale_rule == "power_of_two" for spec in (layer.inputs, layer.weight))


def with_plan(job: Job, plan: Plan | None) -> Job:
    """The job that carries a plan out, with the nodes that ``TuneSpeed`` had left in float when the plan was made."""
    if plan is None or not plan.tuned or job.options.TunedFloat is not None:
        return replace(job, plan=plan)
    return replace(job, plan=plan, options=job.options.changed(repeating(plan)))


def repeating(plan: Plan) -> dict[str, Any]:
    """The options that make the same division again without timing; none where nothing was timed."""
    return {"TuneSpeed": False, "TunedFloat": list(plan.tuned["TunedFloat"])} if plan.tuned else {}


def for_target(job: Job) -> Job:
    """The job as its target wants it.

    ``cpu``: ONNX Runtime's x86 kernels run uint8 activations several times faster than int8 ones, so int8 activations
    become uint8 with a zero point higher by 128 (the same grid, shifted), results of Relu use the whole unsigned range
    (which also lets the runtime drop the Relu), and Q/DQ pairs stand where its fusions look for them.
    """
    if job.target == "any":
        return job
    rules = replace(
        job.rules,
        default=_unsigned_activations(job.rules.default),
        rules=tuple(
            rule if rule.layer is None else replace(rule, layer=_unsigned_activations(rule.layer))
            for rule in job.rules.rules
        ),
    )
    kept = {"RemoveQDQConvLeakyRelu": False, "RemoveQDQConvPRelu": False, "RemoveQDQConvGelu": False}
    options = job.options.changed({"UseUnsignedReLU": True, **kept})
    return replace(job, rules=rules, options=options)


def with_scale_rule(job: Job, rule: str) -> Job:
    """The job with every float32 scale under another rule."""

    def changed(layer: LayerSpec) -> LayerSpec:
        specs = {slot: spec and _with_rule(spec, rule) for slot, spec in vars(layer).items()}
        return LayerSpec(**specs)

    rules = tuple(
        entry if entry.layer is None else replace(entry, layer=changed(entry.layer)) for entry in job.rules.rules
    )
    return replace(job, rules=replace(job.rules, default=changed(job.rules.default), rules=rules))


def _with_rule(spec: TensorSpec, rule: str) -> TensorSpec:
    return replace(spec, scale_rule=rule) if spec.scale_rule == "float32" else spec


def _unsigned_activations(layer: LayerSpec) -> LayerSpec:
    return replace(layer, inputs=_unsigned(layer.inputs), outputs=_unsigned(layer.outputs))


def _unsigned(spec: TensorSpec | None) -> TensorSpec | None:
    return replace(spec, format=UNSIGNED.name) if spec is not None and spec.row == SIGNED else spec
