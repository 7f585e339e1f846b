"""What a Plan did to a model, as tables: operators, formats, and what stayed in float and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Console

from quark.config.plan import Plan
from quark.report.tables import decibels, file_size, print_table
from quark.report.values import Table, Weakness


def operator_table(plan: Plan) -> Table:
    """Nodes per operator type: how many there are, how many compute on quantized values."""
    total = Counter(node.op_type for node in plan.nodes.values())
    quantized = Counter(node.op_type for node in plan.nodes.values() if node.quantized)
    rows = tuple((op_type, str(count), str(quantized[op_type])) for op_type, count in total.most_common())
    sums = ("all", str(total.total()), str(quantized.total()))
    return Table("Operators", ("operator", "nodes", "quantized"), (*rows, sums))


def format_table(plan: Plan) -> Table:
    """Quantized tensors per role and data type."""
    kinds = Counter((tensor.role, tensor.spec.describe()) for tensor in plan)
    rows = tuple((role, description, str(count)) for (role, description), count in sorted(kinds.items()))
    return Table("Quantized tensors", ("role", "data type", "tensors"), rows)


def float_table(plan: Plan) -> Table:
    """Nodes that stayed in float, by reason."""
    reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in plan.nodes.values():
        if not node.quantized:
            reasons[node.reason][node.op_type] += 1
    rows = tuple((reason, _counted(types)) for reason, types in reasons.items())
    return Table("Left in float", ("because", "operators"), rows)


def proposal_table(plan: Plan) -> Table:
    """What the configuration could do better, found in the model alone."""
    return Table("Proposals", ("what",), tuple((sentence,) for sentence in plan.proposals))


#: Rows of the table of weaknesses on a terminal.
SHOWN = 10
PER_CHANNEL = "per channel keeps"


def weakness_table(found: Sequence[Weakness], shown: int = SHOWN) -> Table:
    """Layers that lose most to their weights, the worst first."""
    rows = tuple((one.node, one.op_type, decibels(one.sqnr), one.advice) for one in found[:shown])
    more = f"{len(found) - shown} more. " if len(found) > shown else ""
    remedy = (
        "A preset with _PER_CHANNEL has a scale per channel. "
        if any(PER_CHANNEL in one.advice for one in found)
        else ""
    )
    note = f"{more}{remedy}The outputs of layers are ranked with EvalMetrics and by `quark onnx compare`."
    return Table("Weakest layers", ("node", "operator", "SQNR of weights", "cause and remedy"), rows, note)


def rule_table(plan: Plan) -> Table:
    """Quantized tensors per rule of the configuration that decided about them."""
    rules: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tensor in plan:
        rules[tensor.reason.rpartition(": ")[0] or tensor.reason][tensor.role] += 1
    rows = tuple((rule, _counted(roles)) for rule, roles in rules.items())
    return Table("By which rule", ("rule", "tensors"), rows)


def decision_table(plan: Plan) -> Table:
    """Every quantized tensor with its spec and its reason."""
    rows = tuple((t.name, t.role, t.spec.describe(), t.reason) for t in plan)
    return Table("Tensors", ("tensor", "role", "data type", "because"), rows)


def cost_table(
    title: str, before: int | None, after: int | None, peak: int, seconds: float | None, whole: float | None = None
) -> Table:
    """File size, memory and time, predicted or measured; what is not known is left out.

    Args:
        before, after: bytes of the float and of the quantized file.
        peak: bytes of memory at the peak.
        seconds: time that calibration takes per sample.
        whole: time of all that was done.
    """
    rows = []
    if after:
        rows.append(("file", file_size(after)))
        if before:
            rows.append(("against the float file", f"{before / after:.1f}×"))
    if peak:
        rows.append(("memory at the peak", file_size(peak)))
    if seconds is not None:
        rows.append(("time per sample", f"{seconds:.3g} s"))
    if whole is not None:
        rows.append(("time in all", f"{whole:.3g} s"))
    return Table(title, ("what", "how much"), tuple(rows))


def pass_table(reports: Iterable[tuple[str, int, Sequence[str]]]) -> Table:
    """What graph passes did; those that found nothing to change and nothing to refuse are left out.

    Args:
        reports: (name, how often it fired, the reasons why it did not elsewhere) of each pass.
    """
    rows = []
    for name, fired, refused in reports:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        if fired or refused:
            rows.append((name, str(fired), f"{refused[0]}{more}" if refused else ""))
    return Table("Passes", ("pass", "fired", "first reason where it did not"), tuple(rows))


def _counted(types: Counter[str]) -> str:
    return ", ".join(f"{op_type} {count}" if count > 1 else op_type for op_type, count in types.most_common())


def summary_tables(plan: Plan, weak: Sequence[Weakness] = ()) -> tuple[Table, ...]:
    """The tables of a Plan and of its weak layers; those without a row are left out."""
    tables = (operator_table(plan), format_table(plan), float_table(plan), proposal_table(plan), weakness_table(weak))
    return tuple(table for table in tables if table.rows)


def print_summary(plan: Plan, console: Console | None = None, weak: Sequence[Weakness] = ()) -> None:
    """Write what was quantized, how, and what was not, to ``console`` or to standard output."""
    for table in summary_tables(plan, weak):
        print_table(table, console)
