"""Ways to draft. Each offers propose(context, limit) -> Draft and rewind(length)."""

from decode.proposers.base import Proposer
from decode.proposers.draft_model import DraftModel
from decode.proposers.none import NoDraft

PROPOSERS: dict[str, type[Proposer]] = {
    "draft_model": DraftModel,
    "none": NoDraft,
}
