"""Mixed precision: how much each layer loses alone under each candidate, and which candidate each layer should get.

    sensitivities (a flow measures them)  →  choose (integer programming)  →  verify on data  →  a plan file

This package knows no model. A flow hands it names of layers and candidates, losses and costs; ``quark.onnx.search`` and
``quark.torch.search`` are those flows. Losses are assumed to add up (independent errors, to first order), which the
loop in ``quark.search.loop`` corrects by measuring the plans it finds.
"""
