"""``python -m quark.onnx.tools.evaluate.py``: the spelling that some documents use."""

from __future__ import annotations

import sys

from quark.onnx.tools.evaluate.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
