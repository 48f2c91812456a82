"""Whether two ways to run one model give the same logits, rounding apart. Imports no sibling."""

import torch
from torch import Tensor

# The share of the logits' spread by which they may differ. Rounding in another order leaves 1e-6 in fp32 (1e-3 where a
# GPU shortens its factors) and 1e-2 in half precision; a token seen that should be hidden, or a wrong position, leaves
# 1e-1 and more.
LARGEST_GAP = {torch.float64: 5e-3, torch.float32: 5e-3}
LARGEST_GAP_OF_OTHERS = 5e-2


def agree(ours: Tensor, plain: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits `ours` and `plain` [R, V] of a model of this dtype are the same; NaN agrees with nothing."""
    return relative_gap(ours, plain) <= LARGEST_GAP.get(dtype, LARGEST_GAP_OF_OTHERS)


def relative_gap(ours: Tensor, plain: Tensor) -> float:
    """Norm of the difference of two [R, V], as a share of the plain ones' spread about their row means."""
    gap = torch.where(ours == plain, 0.0, ours.double() - plain.double())  # equal infinities differ by nothing
    finite = plain.double().where(plain.isfinite(), 0.0)
    spread = (finite - finite.mean(-1, keepdim=True)).norm()
    return float(gap.norm() / spread.clamp(min=1e-12))
