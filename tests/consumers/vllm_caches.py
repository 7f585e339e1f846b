"""Classes of vLLM that find no place for the scales of caches in files for it: ``python vllm_caches.py``.

Runs in the environment of ``vllm_judge.py``. Every class of vLLM's registry whose loader joins its own names with those
of vLLM's ``QuarkConfig`` is asked where it leads ``self_attn.k_scale`` and what other exporters write,
``k_proj.output_scale``; a line each says how many classes keep it, and those that do not. Classes with a loader of
their own, and those that need packages which are not there, are counted.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="CRITICAL")
logging.disable(logging.WARNING)
SCALES = ("k_proj.output_scale", "k_scale")


def keeps(kind: type[Any], own: Any, scale: str) -> bool | None:
    """Whether the loader of a class leads a scale to a ``k_scale``; None: it has a way of its own."""
    mapper = getattr(kind, "hf_to_vllm_mapper", None)
    if mapper is None or "mapper=" not in inspect.getsource(kind.load_weights):
        return None
    name = (mapper | own).map_name(f"model.layers.0.self_attn.{scale}")
    return name is None or name.endswith("attn.k_scale")


def main() -> None:
    """Ask every class of vLLM's registry."""
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.models.registry import ModelRegistry

    own = QuarkConfig.get_cache_scale_mapper()
    asked: dict[str, dict[str, bool | None]] = {scale: {} for scale in SCALES}
    unread = 0
    for name, one in sorted(ModelRegistry.models.items()):
        try:
            kind = one.load_model_cls()
            for scale, found in asked.items():
                found[name] = keeps(kind, own, scale)
        except (ImportError, AttributeError, OSError, TypeError, RuntimeError):
            unread += 1
    for scale, found in asked.items():
        lost = [name for name, kept in found.items() if kept is False]
        kept = sum(value is True for value in found.values())
        print(f"{scale}: {kept} classes keep it, {len(lost)} do not: {', '.join(lost)}")
    print(f"{sum(kept is None for kept in found.values())} have a loader of their own, {unread} could not be asked")


if __name__ == "__main__":
    main()
