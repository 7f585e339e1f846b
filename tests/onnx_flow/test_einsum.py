"""An Einsum of two tensors becomes a MatMul that computes the same, with constants and free sizes on either side."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.judged import configuration, opened

from quark.onnx import ModelQuantizer
from quark.onnx.coverage import coverage
from quark.onnx.graph.model import load
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import einsum_to_matmul

SIZES = {letter: size for size, letter in enumerate("bnhijdlkcq", 2)}
EQUATIONS = [
    *("bind,bjnd->bnij", "bnij,bjnd->bind", "bld,dhk->blhk", "blhk,hkd->bld", "ij,jk->ik", "ij,jk", "bij,bj->bi"),
    *("j,ij->i", "hkd,blhk->bld", "bcl,cd->bdl", "bhid,bhjd->bihj", "bij,bij->b", "ij,kj->ki", "bhc,bhk->bck"),
]


def values(term: str, seed: int = 0) -> np.ndarray:
    return models.normal(*(SIZES[letter] for letter in term), seed=seed)


def einsum(equation: str, constant: str, free: bool) -> onnx.ModelProto:
    given, _, result = equation.partition("->")
    both = dict(zip("xz", given.split(","), strict=True))
    sizes = {name: ",".join(one.upper() if free else str(SIZES[one]) for one in term) for name, term in both.items()}
    inputs = ", ".join(f"float[{sizes[name]}] {name}" for name in both if name != constant)
    made = ",".join(f"O{place}" for place in range(len(result or "ik")))
    text = f'g ({inputs}) => (float[{made}] y) {{ y = Einsum<equation = "{equation}">(x, z) }}'
    return models.model(text, {name: values(both[name]) for name in both if name == constant})


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("constant", ["", "x", "z"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_product_is_the_same(equation: str, constant: str, free: bool) -> None:
    proto = einsum(equation, constant, free)
    given = dict(zip("xz", equation.partition("->")[0].split(","), strict=True))
    feed = {name: values(given[name], 5) for name in "xz" if name != constant}
    model = load(proto)
    infer_shapes(model)
    report = einsum_to_matmul.run(model)
    if (
        free
        and not constant
        and len(set(given["x"]) | set(given["z"])) > 4
        and equation.startswith(("bld", "blh", "hkd"))
    ):
        assert report.refused == ("'y' (Einsum) stays: sizes that it would need are not known",)
        return
    assert report.fired == 1
    wanted, found = (opened(one).run(None, feed)[0] for one in (proto, ir.to_proto(model)))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert found.shape == wanted.shape


@pytest.mark.parametrize(
    ("equation", "reason"),
    [
        ("...ij,...jk->...ik", "ellipsis"),
        ("iij,jk->ik", "twice"),
        ("bij,ij->bij", "sums over nothing"),
        ("bij,kj->bk", "one operand alone"),
    ],
)
def test_what_stays_says_why(equation: str, reason: str) -> None:
    shapes = [",".join("4" * len(one.replace(".", ""))) for one in equation.partition("->")[0].split(",")]
    text = (
        f'g (float[{shapes[0]}] x, float[{shapes[1]}] z) => (float y) {{ y = Einsum<equation = "{equation}">(x, z) }}'
    )
    model = load(models.model(text))
    infer_shapes(model)
    report = einsum_to_matmul.run(model)
    assert report.fired == 0 and reason in report.refused[0]


def test_attention_written_as_einsums_is_quantized() -> None:
    """It stayed float, and the coverage did not count it."""
    text = """g (float[2,N,16] x) => (float[2,N,16] y) {
        q = Einsum<equation = "bnd,dhk->bnhk">(x, wq) k = Einsum<equation = "bnd,dhk->bnhk">(x, wk)
        s = Einsum<equation = "bnhk,bmhk->bhnm">(q, k) p = Softmax<axis = -1>(s)
        a = Einsum<equation = "bhnm,bmhk->bnhk">(p, q) y = Einsum<equation = "bnhk,hkd->bnd">(a, wo) }"""
    weights = {"wq": models.normal(16, 4, 4), "wk": models.normal(16, 4, 4, seed=1), "wo": models.normal(4, 4, 16)}
    proto, feed = models.model(text, weights), {"x": models.normal(2, 6, 16)}
    made = ModelQuantizer(configuration("A8W8")).quantize_model(proto, None, [feed])
    assert made is not None and not any(node.op_type == "Einsum" for node in made.graph.node)
    assert coverage(made, feed).integer == 1 and coverage(proto, feed).integer == 0
    assert coverage(proto, feed).macs == coverage(made, feed).macs
