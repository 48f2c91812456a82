"""A function of a draft's logits, taken from its last hidden states and its head in chunks: [N, M] never exists.

The gradient is made in the forward pass, chunk by chunk, so that nothing of [N, M] waits for the backward; the
function itself is differentiated by autograd, so whatever loss it holds needs no second form.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# fp32 bytes of a chunk's logits. What glibc frees above 32 MiB goes back to the system; smaller pieces pile up in its
# heap: 2048 positions of 49k ids on a CPU peak at 819 MB with 16 MiB, at 260 to 320 with 33, which is as fast.
CHUNK_BYTES = 33 * 2**20

Evaluate = Callable[[int, int, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(start, stop, logits [n, M]) -> a scalar to differentiate, and two results per position [n] without gradient."""


def chunk_size(width: int) -> int:
    """Positions whose logits over `width` ids fill a chunk."""
    return max(1, CHUNK_BYTES // (4 * width))


def chunked(
    hidden: Tensor,  # [N, d]
    head: nn.Linear,  # d -> M
    evaluate: Evaluate,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the scalars of all chunks of `size` positions, and the results per position, [N] each.

    Gradients reach `hidden` and the head's weight and bias where they are asked for. Under autocast the products are
    in its dtype and sums over chunks in fp32; in fp16 the gradients' products are in fp32, for they are not scaled yet.
    """
    inputs = [hidden, head.weight, head.bias]
    if not torch.is_grad_enabled():  # a function is told what requires gradients, not whether they are wanted
        inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
    found: tuple[Tensor, Tensor, Tensor] = _Chunked.apply(*inputs, evaluate, size)
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, evaluate: Evaluate, size: int
    ) -> tuple[Tensor, ...]:
        head = _Head(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            starts = range(0, max(len(hidden), 1), size)  # no position still makes one chunk, of nothing
            totals, *results = zip(*(head.chunk(start, start + size, evaluate) for start in starts), strict=True)
        ctx.gradients = head.gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        losses, overlap = (torch.cat(parts) for parts in results)
        ctx.mark_non_differentiable(losses, overlap)
        return torch.stack(totals).sum(), losses, overlap

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        scaled = (None if grad is None else (grad * grad_total).to(dtype) for grad, dtype in pairs)
        return (*scaled, None, None)


class _Head:
    """Multiplies by the head, chunk by chunk, forward and backward."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        device, dtype = hidden.device.type, weight.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        self.hidden, self.weight = hidden.detach().to(dtype), weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.backward_dtype = torch.float32 if dtype == torch.float16 else dtype
        wide = torch.promote_types(dtype, torch.float32)
        tensors = zip((hidden, weight, bias), needed, strict=True)
        self.gradients = [torch.zeros_like(t, dtype=wide) if t is not None and need else None for t, need in tensors]

    def chunk(self, start: int, stop: int, evaluate: Evaluate) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(self.hidden[start:stop], self.weight, self.bias)
        wanted = any(gradient is not None for gradient in self.gradients)
        with torch.set_grad_enabled(wanted):
            total, losses, overlap = evaluate(start, stop, logits.requires_grad_(wanted))
        if wanted:
            self._add(start, stop, *torch.autograd.grad(total, logits))
        return total.detach(), losses, overlap

    def _add(self, start: int, stop: int, grad: Tensor) -> None:
        """Pass the gradient of a chunk's logits on."""
        to_hidden, to_weight, to_bias = self.gradients
        grad = grad.to(self.backward_dtype)
        if to_hidden is not None:
            to_hidden[start:stop] = grad @ self.weight.to(grad.dtype)
        if to_weight is not None:
            _add_product(to_weight, grad.T, self.hidden[start:stop].to(grad.dtype))
        if to_bias is not None:
            to_bias += grad.sum(0, dtype=to_bias.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in `total`'s dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
