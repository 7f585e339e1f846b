"""Adapters: one file per algorithm, from a graph to the arrays of ``quark.algorithms`` and back."""
