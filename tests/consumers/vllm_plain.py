"""In plain torch: compiled operators of vLLM that its CPU layers call, so that they run where vLLM is not compiled.

Only what the name of an operator says is computed here; which layer calls it, with which codes, scales and zero points
as they are after ``process_weights_after_loading``, is vLLM's. MXFP4 and MXFP6 are the arithmetic of AMD's own package
(``amd-quark``, from the folder in ``AMD_QUARK``), as vLLM calls it; its compiled part for MXFP4 has no CPU, so that its
general emulation of FP4 stands in.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.kernels.linear as kernels
import vllm.platforms
from vllm.platforms import PlatformEnum
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

TABLES = {"Mxfp4": "MXFP4", "Mxfp6": "MXFP6", "Mxfp8": "MXFP8", "NvFp4": "NVFP4"}
BLOCK = 32
FP8_MAX, INT8_MAX = 448.0, 127.0
OPERATORS = """
static_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor scale, int[]? group_shape=None) -> ()
dynamic_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor(b!) scale) -> ()
dynamic_per_token_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor(b!) scale, Tensor? scale_ub=None) -> ()
static_scaled_int8_quant(Tensor(a!) out, Tensor x, Tensor scale, Tensor? azp=None) -> ()
dynamic_scaled_int8_quant(Tensor(a!) out, Tensor x, Tensor(b!) scale, Tensor(c!)? azp=None) -> ()
"""


def offer() -> None:
    """A CPU of which vLLM believes that it has every type."""
    vllm.platforms._current_platform = CpuPlatform()
    CpuPlatform.get_device_capability = classmethod(lambda cls, *a, **k: DeviceCapability(10, 0))
    CpuPlatform.has_device_capability = classmethod(lambda cls, *a, **k: True)
    for word, name in TABLES.items():
        kernel = getattr(kernels, f"Emulation{word}LinearKernel")
        getattr(kernels, f"_POSSIBLE_{name}_KERNELS")[PlatformEnum.CPU] = [kernel]
        kernel.is_supported = classmethod(lambda cls, *a, **k: (True, None))
    library = torch.library.Library("_C", "FRAGMENT")
    for line in OPERATORS.strip().splitlines():
        library.define(line)
        library.impl(line.partition("(")[0], globals()[line.partition("(")[0]], "CPU")
    globals()["KEPT"] = library  # its operators go when it goes
    offer_integers()
    offer_experts()
    offer_amd()


# ---- FP8 and int8 ----------------------------------------------------------------------------------------------------


def static_scaled_fp8_quant(out: Any, x: Any, scale: Any, group_shape: Any = None) -> None:
    out.copy_((x.float() / scale.float().reshape(-1)[0]).clamp(-FP8_MAX, FP8_MAX).to(out.dtype))


def dynamic_scaled_fp8_quant(out: Any, x: Any, scale: Any) -> None:
    scale.copy_((x.float().abs().amax() / FP8_MAX).reshape(scale.shape))
    static_scaled_fp8_quant(out, x, scale)


def dynamic_per_token_scaled_fp8_quant(out: Any, x: Any, scale: Any, scale_ub: Any = None) -> None:
    scale.copy_(x.float().abs().amax(-1, keepdim=True) / FP8_MAX)
    out.copy_((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(out.dtype))


def static_scaled_int8_quant(out: Any, x: Any, scale: Any, azp: Any = None) -> None:
    zero = 0 if azp is None else azp
    out.copy_(((x.float() / scale).round() + zero).clamp(-128, 127).to(torch.int8))


def dynamic_scaled_int8_quant(out: Any, x: Any, scale: Any, azp: Any = None) -> None:
    values = x.float()
    if azp is None:
        scale.copy_(values.abs().amax(-1, keepdim=True) / INT8_MAX)
    else:
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        scale.copy_((high - low) / 255)
        azp.copy_((-128 - low / scale).round().to(azp.dtype))
    static_scaled_int8_quant(out, x, scale, azp)


class Int8Product:
    """What oneDNN's handler holds: codes [in, out] and scales."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, *rest: Any) -> None:
        self.weight, self.scale, self.n = weight.float(), scale.float().reshape(-1), weight.shape[1]


def int8_product(handler: Int8Product, x: Any, out: Any, scale: Any, azp: Any, adj: Any, bias: Any) -> None:
    values = x.float() - (0 if azp is None else azp.float())
    found = (values @ handler.weight) * handler.scale * scale.float()
    out.copy_(found if bias is None else found + bias.float())


# ---- packed integers -------------------------------------------------------------------------------------------------


def offer_integers() -> None:
    """Weights in integers, unpacked by vLLM's own functions; codes and scales stay as vLLM has loaded them."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    def unpacked(self: Any, layer: Any) -> None:
        weight, scale, zero = self._get_weight_params(layer)
        kind, size = self.config.weight_type, self.config.group_size
        codes = unpack(weight.data, kind, 0).float()
        rows = codes.shape[0] if size <= 0 else size
        zeros = unpack(zero.data, kind, 1).float() if self.config.zero_points else torch.tensor(float(kind.bias))
        spread = zeros.repeat_interleave(rows, 0) if zeros.dim() else zeros
        layer.dense = ((codes - spread) * scale.data.float().repeat_interleave(rows, 0)).T

    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32 as unpack

    CPUWNA16LinearKernel._process_gptq_weights_w4a16 = unpacked
    CPUWNA16LinearKernel.apply_weights = lambda self, layer, x, bias=None: F.linear(x, layer.dense.to(x.dtype), bias)
    CPUWNA16LinearKernel.can_implement = classmethod(lambda cls, c: (True, None))
    cpu.check_cpu_sgl_kernel = lambda *a: False
    ops.create_onednn_scaled_mm, ops.onednn_scaled_mm = Int8Product, int8_product


def offer_experts() -> None:
    """Backends of experts that vLLM has for every GPU: without one it would not even load the weights."""
    from vllm.model_executor.layers.fused_moe.experts.int4_emulation_moe import Int4EmulationTritonExperts as Emulation
    from vllm.model_executor.layers.fused_moe.oracle import int8, int_wna16, mxfp4, nvfp4

    for oracle, backend in (
        (mxfp4, mxfp4.Mxfp4MoeBackend.EMULATION),
        (nvfp4, nvfp4.NvFp4MoeBackend.EMULATION),
        (int8, int8.Int8MoeBackend.TRITON),
    ):
        for kernel in oracle.backend_to_kernel_cls(backend):
            kernel.is_supported_config = staticmethod(lambda *a: (True, None))

    Emulation._supports_current_device = staticmethod(lambda: True)
    int_wna16._get_priority_backends = lambda: [int_wna16.WNA16MoEBackend.EMULATION]


# ---- MX formats ------------------------------------------------------------------------------------------------------


def offer_amd() -> None:
    """MXFP4 and MXFP6 as AMD's package computes them, where it is."""
    if (folder := os.environ.get("AMD_QUARK")) is None:
        return
    sys.path.insert(0, folder)
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import (
        dequantize_fp4_fp6_per_group,
        fake_quantize_fp4_fp6_per_group_with_scale,
    )
    from quark.torch.quantization.utils import even_round, reshape_to_blocks
    from quark.torch.utils.pack import create_pack_method

    def dq_mxfp4(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes = create_pack_method(None, dtype="fp4").unpack(x, reorder=False)
        factor = 2.0 ** (scale.view(torch.uint8).to(torch.int16) - 127).float()
        found = dequantize_fp4_fp6_per_group(codes, factor, axis=-1, group_size=BLOCK, quant_dtype="fp4")
        return found.to(dtype)

    def qdq_mxfp4(x: torch.Tensor, mode: str = "even") -> torch.Tensor:
        scale = even_round(reshape_to_blocks(x, BLOCK, -1).abs().amax(-1), "fp4")
        return fake_quantize_fp4_fp6_per_group_with_scale(x, scale, axis=-1, group_size=BLOCK, quant_dtype="fp4")

    import quark.torch.kernel as owner

    owner.mx = types.SimpleNamespace(dq_mxfp4=dq_mxfp4, qdq_mxfp4=qdq_mxfp4)
