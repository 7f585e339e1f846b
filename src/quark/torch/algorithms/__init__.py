"""The torch side of ``quark.algorithms``: which layers, with which inputs, in which order; the mathematics is there."""
