"""Ways to draft, for all rows of a batch. Each is made from a Setup; see Proposer."""

from decode.proposers.base import Proposer, Setup
from decode.proposers.draft_model import DraftModel
from decode.proposers.none import NoDraft

PROPOSERS: dict[str, type[Proposer]] = {
    "draft_model": DraftModel,
    "none": NoDraft,
}

__all__ = ["PROPOSERS", "Proposer", "Setup"]
