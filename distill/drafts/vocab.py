"""Reduced draft vocabulary: which ids a draft may propose, and a full-size head that proposes no others.

A draft with a reduced vocabulary trains and drafts with a head of N rows. On disk it is a plain model with the
target's V rows, and whatever loads it must give the N rows the same law. Rows that are merely zero would not do:
their logit is 0, which beats every negative one. So one channel of the residual stream, channel 0, is reserved and
always 1: every embedding has 1 there, no layer writes to it, and the last norm does not scale it. The head then sees
h[0] = 1 / rms(x) > 0, and each excluded row is the guard row: the mean of the kept rows, less 1e4 in channel 0. Its
logit is

    mean of the kept logits - 1e4 * h[0]  <  largest kept logit,    whatever h is,

and as rms(x) is of order 1 to 100 the gap is hundreds of nats: the excluded rows' probabilities are 0 in fp32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from decode.errors import UsageError, require
from distill.data.examples import Example

GUARD_CHANNEL = 0
GUARD_VALUE = -1e4  # representable in fp16 and bf16; the logits stay finite in fp32 for every hidden size


@dataclass(frozen=True)
class DraftVocab:
    """The ids that a draft may propose."""

    ids: Tensor  # [N] int64, ascending
    coverage: float  # share of the data's generated tokens that are among them
    num_seen: int  # distinct tokens generated in the data
    log_frequency: Tensor  # [N] how often each id was generated, as a log-probability, less its mean over the ids

    def describe(self, vocab_size: int) -> str:
        return (
            f"draft vocabulary: {len(self.ids)} of {vocab_size} tokens ({self.num_seen} occur), "
            f"covering {self.coverage:.1%} of the generated tokens"
        )


def choose_draft_vocab(
    examples: Iterable[Example], size: int, vocab_size: int, required: Iterable[int], special: Iterable[int] = ()
) -> DraftVocab:
    """The `size` most frequent generated tokens of `examples`; ties go to the lower id.

    `required` ids (end of sequence) are always in, and so are `special` ids that were generated. Where fewer tokens
    occur than wanted, the rest are the most frequent tokens of the prompts, then the lowest ids (bytes and common
    pieces in BPE tables). Raises UsageError when `size` is not below `vocab_size`, or leaves no room for the ids
    that must be in.
    """
    require(size < vocab_size, "draft_vocab_size", size, f"an integer below the target's {vocab_size}, or null for all")
    generated, context = count_tokens(examples, vocab_size)
    if not generated.any():
        raise UsageError("data: it has no generated token to count for draft_vocab_size")
    forced = torch.zeros(vocab_size, dtype=torch.int64)
    forced[[*required, *(i for i in special if generated[i] > 0)]] = 1
    num_forced = int(forced.sum())
    require(size >= num_forced, "draft_vocab_size", size, f"at least {num_forced}, the special tokens that must be in")
    order = torch.arange(vocab_size)
    for key in (context, generated, forced):  # stable sorts, the last key weighs most
        order = order[key[order].argsort(descending=True, stable=True)]
    ids = order[:size].sort().values
    coverage = float(generated[ids].sum() / generated.sum())
    smoothed = generated[ids] + 0.5
    log_frequency = (smoothed / smoothed.sum()).log()
    return DraftVocab(ids, coverage, int((generated > 0).sum()), log_frequency - log_frequency.mean())


def count_tokens(examples: Iterable[Example], vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often each id was generated, and how often it stands in prompts: two [V] int64 tables."""
    counts = torch.zeros(2, vocab_size, dtype=torch.int64)
    for example in examples:
        ids, mask = torch.tensor(example.input_ids), torch.tensor(example.mask, dtype=torch.bool)
        counts[0] += torch.bincount(ids[mask], minlength=vocab_size)
        counts[1] += torch.bincount(ids[~mask], minlength=vocab_size)
    return counts[0], counts[1]


@torch.no_grad()
def pin_guard_channel(model: PreTrainedModel) -> None:
    """Reserve channel 0 of a Llama-type `model`: constantly 1 in the residual stream. In place and cheap.

    Called once by init, then after every optimiser step, for drafts with a reduced vocabulary only. The head's own
    column 0 stays free: it acts as a bias of each kept token.
    """
    for tensor, value in guarded_slices(model):
        tensor.fill_(value)


def guarded_slices(model: PreTrainedModel) -> list[tuple[Tensor, float]]:
    """Views of the parameters that make channel 0 constant, each with the value it must hold."""
    return [(_held_here(parameter.detach(), index), value) for parameter, index, value in _guarded(model)]


def _held_here(tensor: Tensor, index: Any) -> Tensor:
    """The view of `tensor` at `index`; of one whose rows are spread over processes, what of it this process holds."""
    if not isinstance(tensor, DTensor):
        return tensor[index]
    is_elsewhere = index == GUARD_CHANNEL and tensor.device_mesh.get_local_rank() > 0  # the first process has row 0
    return tensor.to_local()[:0] if is_elsewhere else tensor.to_local()[index]


@torch.no_grad()
def drop_guard_gradients(model: PreTrainedModel) -> None:
    """Zero the gradients of what pin_guard_channel holds: they move nothing, and count in no norm that clips others."""
    for parameter, index, _ in _guarded(model):
        if parameter.grad is not None:
            _held_here(parameter.grad, index).zero_()


def _guarded(model: PreTrainedModel) -> list[tuple[nn.Parameter, Any, float]]:
    """(parameter, index in it, value) of all that makes channel 0 constant."""
    body = model.model
    column = (slice(None), GUARD_CHANNEL)
    places = [(body.embed_tokens.weight, column, 1.0), (body.norm.weight, GUARD_CHANNEL, 1.0)]
    for layer in body.layers:
        places += [
            (layer.self_attn.o_proj.weight, GUARD_CHANNEL, 0.0),
            (layer.mlp.down_proj.weight, GUARD_CHANNEL, 0.0),
        ]
    return places


@torch.no_grad()
def widen_head(model: PreTrainedModel, vocab_ids: Tensor, vocab_size: int) -> None:
    """Give `model` a head of `vocab_size` rows in place: the narrowed head's row i at vocab_ids[i], else guard rows.

    The inverse of decode.models.narrow_head. Raises UsageError when channel 0 is not reserved: then nothing keeps
    the excluded rows below the others.
    """
    if any((tensor != value).any() for tensor, value in guarded_slices(model)):
        raise UsageError(
            "draft: channel 0 is not reserved, so a head of full size could propose tokens outside its vocabulary"
        )
    narrow = model.lm_head.weight  # [N, d]
    head = nn.Linear(narrow.shape[1], vocab_size, bias=False, device=narrow.device, dtype=narrow.dtype)
    guard = narrow.float().mean(dim=0)
    guard[GUARD_CHANNEL] += GUARD_VALUE
    head.weight.copy_(guard.to(narrow.dtype).expand(vocab_size, -1))
    head.weight[vocab_ids.to(narrow.device)] = narrow
    head.weight.requires_grad_(narrow.requires_grad)
    model.lm_head = head
