"""What a run costs, in floating-point operations."""

from torchpact.flops.count import FlopCount, count_flops, flops_from_ponders, max_flops

__all__ = ["FlopCount", "count_flops", "flops_from_ponders", "max_flops"]
