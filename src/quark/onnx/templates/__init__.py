"""Lists of passes for the five common targets, as YAML files; :mod:`quark.onnx.shapeshifter` reads them."""
