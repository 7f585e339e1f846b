"""Constants that a body of If, Loop or Scan reads alone become its own (FasterForms).

ONNX Runtime packs weights for its kernels and lets the originals go. Where a body reads one from outside, what it is
given then is no tensor, and for want of its shape nothing is planned of the body's memory: each iteration allocates
every tensor by itself. A recurrent network of Keras of 2 x 30 iterations: 290 microseconds, and 227 with the weights in
the bodies (234 as they came, going around as state).

Left where they are: constants that several graphs read, outputs and inputs of the model.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.report import PassReport


def run(model: ir.Model) -> PassReport:
    """Move them, in place."""
    fired = 0
    for name, value in list(model.graph.initializers.items()):
        places = {use.node.graph for use in value.uses()}
        body = places.pop() if len(places) == 1 else model.graph
        if isinstance(body, ir.Graph) and body is not model.graph and not _is_outside(value):
            del model.graph.initializers[name]
            body.register_initializer(value)
            fired += 1
    return PassReport("body_constants", fired)


def _is_outside(value: ir.Value) -> bool:
    return value.is_graph_output() or value.is_graph_input()
