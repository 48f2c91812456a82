"""Ways to draft. Each is made from a Setup and offers propose(context, limit) -> Draft and rewind(length)."""

from decode.proposers.base import Proposer, Setup
from decode.proposers.draft_model import DraftModel
from decode.proposers.none import NoDraft

PROPOSERS: dict[str, type[Proposer]] = {
    "draft_model": DraftModel,
    "none": NoDraft,
}

__all__ = ["PROPOSERS", "Proposer", "Setup"]
