"""Teachers: what turns a batch into the target's law at its supervised positions."""

from typing import Protocol

import torch

from distill.data.batches import Batch
from distill.laws import Law


class Teacher(Protocol):
    """Gives the target's law, at the loss's temperature, for every supervised position of a batch, in their order."""

    def law(self, batch: Batch) -> Law: ...

    def to(self, device: torch.device) -> None: ...
