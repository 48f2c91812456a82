"""Draft length policies: how many tokens a round drafts. A policy lives for one text and never biases the output.

A policy decides from the counts of earlier rounds, and from laws before a token is drawn from them. It never discards
a token that was drawn, for what is left would follow another law than the one that is declared. These files import no
library, as settings are checked against the names.
"""

from decode.draft_length.base import FIXED_LENGTH, LONGEST_DRAFT, DraftLength, Fixed, LengthSetup
from decode.draft_length.cost_model import CostModel
from decode.draft_length.heuristic import Heuristic
from decode.draft_length.watching import Confidence, Entropy

DRAFT_LENGTHS: dict[str, type[DraftLength]] = {
    "fixed": Fixed,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "entropy": Entropy,
    "cost_model": CostModel,
}

__all__ = ["DRAFT_LENGTHS", "FIXED_LENGTH", "LONGEST_DRAFT", "DraftLength", "LengthSetup"]
