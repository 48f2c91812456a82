"""oneDNN-prepacked linear layers: the CPU backend. Weights are laid out once as the kernels want them."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

# The number of rows that the layout is tuned for; decoding multiplies a few rows at a time.
ROWS_HINT = 4

ModelT = TypeVar("ModelT", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout; inference only, fp32, CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


def can_prepack(model: nn.Module) -> bool:
    """Whether every weight is fp32 on the CPU and this build of torch has oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    return all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())


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
            setattr(module, name, PackedLinear(child))
        else:
            _replace_linears(child)
