"""First values of a draft's embeddings and head, drawn from the target's own tables."""

import torch
from torch import Tensor

# Residual channels start near the guard channel's 1, so that neither drowns the other in the first norm.
EMBEDDING_STD = 1.0
HEAD_STD = 0.02


def principal_directions(table: Tensor, rank: int) -> Tensor:
    """The `rank` leading principal directions of the rows of `table` [V, D], as columns [D, rank], in fp32.

    From the eigenvectors of the covariance; the largest variance comes first. `rank` above D is cut to D.
    """
    centred = table.float() - table.float().mean(dim=0)
    _, vectors = torch.linalg.eigh((centred.T @ centred).double())  # ascending
    return vectors.flip(1)[:, :rank].float()


def project(table: Tensor, directions: Tensor, width: int, std: float) -> Tensor:
    """Rows of `table` [V, D] along `directions` [D, R], as [V, width] of standard deviation `std`.

    Channels beyond R, where the target is narrower than the draft, are drawn at random from the global generator.
    """
    centred = table.float() - table.float().mean(dim=0)
    projected = centred @ directions
    projected = projected * (std / projected.std())
    missing = width - projected.shape[1]
    return torch.cat([projected, torch.randn(len(table), missing) * std], dim=1) if missing > 0 else projected
