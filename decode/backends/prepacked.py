"""oneDNN-prepacked linear layers: the CPU backend. Weights are laid out once as the kernels want them."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The number of rows that the layout is tuned for; decoding multiplies a few rows at a time.
ROWS_HINT = 4
# A oneDNN call costs 20 to 40 us before it multiplies, the plain product 3. For a single row of a weight of at most so
# many numbers the plain one is faster; it runs on one thread, so that larger weights are better off packed.
SMALL_WEIGHT = 2**17

ModelT = TypeVar("ModelT", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout; inference only, fp32, CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self.plain = weight.detach() if weight.numel() <= SMALL_WEIGHT else None
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        if self.plain is not None and inputs.numel() == self.in_features:
            return F.linear(inputs, self.plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(inputs, self.packed, self.bias, "none", [], "")


def can_prepack(model: nn.Module) -> bool:
    """Whether every weight is fp32 on the CPU and this build of torch has oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    return all(
        type(p) is nn.Parameter and p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()
    )


@torch.no_grad()
def prepack(model: ModelT) -> ModelT:
    """A twin of `model` that shares every tensor with it, its linear layers replaced by packed ones.

    The original is left as it is. Changing the original's weights later does not reach the packed copies.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo=shared)
    _replace_linears(twin)
    return twin


def _replace_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            _replace_linears(child)
