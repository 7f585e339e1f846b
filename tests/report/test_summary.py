"""What a Plan did, as tables."""

from __future__ import annotations

import io
import random
import subprocess
import sys

from rich.console import Console

from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.report.summary import pass_table, print_summary, summary_tables
from quark.report.tables import print_table


def example() -> Plan:
    nodes = [
        NodePlan("a", "Conv", True, "known"),
        NodePlan("b", "Conv", True, "known"),
        NodePlan("c", "Softmax", False, "not in the table of operators"),
        NodePlan("d", "Conv", False, "exclude"),
    ]
    int8, int32 = TensorSpec("int8"), TensorSpec("int32")
    tensors = [
        TensorPlan("x", "activation", int8, "input"),
        TensorPlan("y", "activation", int8, "output"),
        TensorPlan("w", "weight", int8, "weight"),
        TensorPlan("b", "bias", int32, "bias"),
    ]
    return Plan({tensor.name: tensor for tensor in tensors}, {node.name: node for node in nodes})


def test_tables_count_nodes_tensors_and_reasons() -> None:
    operators, formats, floats = summary_tables(example())
    assert operators.rows == (("Conv", "3", "2"), ("Softmax", "1", "0"), ("all", "4", "2"))
    assert [(row[0], row[2]) for row in formats.rows] == [("activation", "2"), ("bias", "1"), ("weight", "1")]
    assert formats.rows[0][1] == TensorSpec("int8").describe()
    assert floats.rows == (("not in the table of operators", "Softmax"), ("exclude", "Conv"))


def test_nothing_left_in_float_is_no_table() -> None:
    plan = example()
    for name in ("c", "d"):
        del plan.nodes[name]
    assert [table.title for table in summary_tables(plan)] == ["Operators", "Quantized tensors"]


def test_passes_that_had_nothing_to_do_are_left_out() -> None:
    table = pass_table([("fold", 2, ()), ("fuse", 0, ("a stays: b", "c stays: d")), ("split", 0, ())])
    assert table.rows == (("fold", "2", ""), ("fuse", "0", "a stays: b (and 1 more)"))
    stream = io.StringIO()
    print_table(pass_table([]), Console(file=stream))
    assert stream.getvalue() == ""


def test_print_summary() -> None:
    stream = io.StringIO()
    print_summary(example(), Console(file=stream, width=100))
    assert "Softmax" in stream.getvalue() and "Left in float" in stream.getvalue()


def test_imports_leave_the_caller_s_random_numbers_alone() -> None:
    code = "import random; random.seed(1); import quark.onnx.flow, quark.report.html; print(random.random())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) == random.Random(1).random()
