"""The operators of domains ``com.amd.quark`` and ``org.openquark`` as ONNX functions made of standard operators.

A model whose nodes come from ``node`` (or from another tool) and that went through ``add_functions`` runs on any ONNX
runtime without a custom-op library; a runtime or compiler with its own kernel for an operator uses that.
"""

from quark.operators.functions import add_functions, known_values, required_functions, site_of
from quark.operators.registry import (
    DOMAIN,
    OPERATORS,
    OWN_DOMAIN,
    VERSION,
    Operator,
    function_for,
    get_operator,
    node,
    overload,
)
from quark.operators.storage import StoredWeight, stored, stream
from quark.operators.views import NodeFacts

__all__ = [
    "DOMAIN",
    "OPERATORS",
    "OWN_DOMAIN",
    "VERSION",
    "NodeFacts",
    "Operator",
    "StoredWeight",
    "add_functions",
    "function_for",
    "get_operator",
    "known_values",
    "node",
    "overload",
    "required_functions",
    "site_of",
    "stored",
    "stream",
]
