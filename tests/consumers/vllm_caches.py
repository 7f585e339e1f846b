"""Classes of vLLM that find no place for the scales of caches in the quark format: ``python vllm_caches.py > LIST``.

Runs in the environment of ``vllm_judge.py``; LIST is ``src/quark/torch/export/vllm_caches.txt``. A class is listed if
its own names, joined with those of vLLM's ``QuarkConfig`` as its loader joins them, do not lead from
``k_proj.output_scale`` to ``attn.k_scale``. Classes that need packages which are not there are not listed: how many
goes to standard error.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from typing import Any

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="CRITICAL")
logging.disable(logging.WARNING)
SCALE = "model.layers.0.self_attn.k_proj.output_scale"


def loses(kind: type[Any], own: Any) -> bool:
    """Whether the loader of a class gives the scale another name than that of its place."""
    mapper = getattr(kind, "hf_to_vllm_mapper", None)
    if mapper is None or "mapper=" not in inspect.getsource(kind.load_weights):
        return False
    name = (mapper | own).map_name(SCALE)
    return name is not None and not name.endswith(".attn.k_scale")


def main() -> None:
    """Ask every class of vLLM's registry."""
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.models.registry import ModelRegistry

    print("# written by tests/consumers/vllm_caches.py: classes of vLLM 0.33")
    unread = []
    for name, one in sorted(ModelRegistry.models.items()):
        try:
            if loses(one.load_model_cls(), QuarkConfig.get_cache_scale_mapper()):
                print(name)
        except (ImportError, AttributeError, OSError, TypeError, RuntimeError) as error:
            unread.append(f"{name} ({error})")
    print(f"{len(unread)} classes could not be asked: {'; '.join(unread)}", file=sys.stderr)


if __name__ == "__main__":
    main()
