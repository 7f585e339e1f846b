"""How long a layer takes on an accelerator, estimated: the roofline.

    seconds = max( bytes / bandwidth,   2 products / operations · bits / 16 )

``bits`` is the wider of weight and input, because the narrower operand is widened to it: weights alone in 4 bits save
memory traffic and no arithmetic. S. Williams, A. Waterman, D. Patterson: Roofline (CACM 2009). Not handled: launch
times, fusion, kernels that do not exist for a type.
"""

from __future__ import annotations

from quark.dataclass import dataclass


@dataclass(frozen=True)
class Machine:
    """An accelerator.

    Attributes:
        bandwidth: of its memory, bytes per second.
        operations: dense 16-bit multiplications and additions per second.
        narrowest: bits below which arithmetic gets no faster.
    """

    bandwidth: float
    operations: float
    narrowest: float = 8.0


#: AMD Instinct MI300X, as its data sheet says: 5.3 TB/s, 1307.4 TFLOPS in bfloat16, twice that in 8 bits.
MI300X = Machine(5.3e12, 1307.4e12)


def seconds_of(machine: Machine, bytes: float, products: float, bits: float) -> float:
    """Estimated seconds of one layer for one sample.

    Args:
        machine: where.
        bytes: that are read.
        products: multiplications.
        bits: of the wider operand.
    """
    width = min(max(bits, machine.narrowest), 16.0) / 16.0
    return max(bytes / machine.bandwidth, 2 * products / machine.operations * width)
