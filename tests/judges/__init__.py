"""Tests that others wrote for their programs, run as they are against this one: what stands between is one module each.

A module here is a plugin of pytest (or, for the operators of ONNX, tests made of the cases that the package onnx has).
It puts our functions in the place of theirs and leaves the tests alone. Nothing of theirs is stored here.
"""
