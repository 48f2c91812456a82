"""Policies that end a draft where its own law says that the next token is unsure."""

from typing import TYPE_CHECKING, ClassVar

from decode.draft_length.base import Fixed, LengthSetup

if TYPE_CHECKING:
    from decode.laws import Law


class Confidence(Fixed):
    """Stop where the draft's likeliest token is less likely than a threshold (default 0.4, as in transformers, which
    looks only after it has drawn the token)."""

    watches: ClassVar[bool] = True
    default_threshold: ClassVar[float] = 0.4

    def __init__(self, setup: LengthSetup) -> None:
        super().__init__(setup)
        self._threshold = self.default_threshold if setup.threshold is None else setup.threshold

    def stop(self, law: "Law") -> bool:
        return float(law.probs.max()) < self._threshold


class Entropy(Confidence):
    """Stop where a lower bound on acceptance, 1 - sqrt(c H), is below a threshold (default 0.2); H is the entropy of
    the draft's law in nats.

    AdaEDL (Agrawal, Jeon and Lee 2024): acceptance is 1 - TV(p, q), which Pinsker's inequality bounds by the divergence
    of p and q; of that, which only the target knows, the paper takes c H as a stand-in, with c = 0.2 throughout. Its
    threshold drifts with the acceptance seen; here it stays, so c = 0.2 and 0.2 mean: stop beyond 3.2 nats.
    """

    default_threshold: ClassVar[float] = 0.2
    SCALE: ClassVar[float] = 0.2

    def stop(self, law: "Law") -> bool:
        entropy = -float(law.probs.xlogy(law.probs).sum())
        return 1 - (self.SCALE * max(entropy, 0.0)) ** 0.5 < self._threshold
