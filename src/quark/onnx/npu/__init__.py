"""What the NPU's arithmetic asks of a Plan: positions within its shifters, and operators as it computes them."""
