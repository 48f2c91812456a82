"""A server's law at each position of whole examples, as far as it tells: the likeliest ids and the mass of the rest."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from decode.errors import UsageError, require
from distill.config.server import ServerConfig
from distill.data.examples import Example
from distill.remote.client import Client
from distill.remote.protocol import scoring_request, top_log_probs
from distill.remote.target import find_served, run
from distill.remote.window import in_order

SMALLEST_TAIL = 2.0**-24
"""Half the last place of 1 in fp32: what 1 minus a sum of fp32 probabilities can't tell from 0."""


class RemoteScorer:
    """Scores examples like distill.teacher.scoring.TargetScorer, with a server in the target's place.

    The tail is 1 less the kept mass, for a server does not sum the rest. It has the rounding noise of the kept
    log-probs, about 1e-7 in mass: good where the tail is large, coarse where it hardly counts, never below
    SMALLEST_TAIL.
    """

    def __init__(
        self, server: ServerConfig, top_k: int, temperature: float, vocab_size: int, vocab_ids: Tensor | None = None
    ) -> None:
        """Raises UsageError for what a server can't tell, and as find_served does."""
        legal = f"at most the target's {vocab_size} ids"
        require(top_k <= vocab_size, "top_k", top_k, legal)
        legal = "1 with server.url: a server gives the log-probs of prompts at temperature 1 only"
        require(temperature == 1, "temperature", temperature, legal)
        if vocab_ids is not None:
            raise UsageError(
                f"server.url: the tail of a draft with a reduced vocabulary ({len(vocab_ids)} ids) can't be had from a "
                "server, which names the likeliest ids only; score with the target itself, or train a draft of all ids"
            )
        self.server, self.top_k, self.vocab_size = server, top_k, vocab_size
        self.served = find_served(server)

    def score_batch(self, members: Sequence[int], examples: Sequence[Example]) -> dict[str, Tensor]:
        """Per supervised position of each member, in order: N positions, K = top_k.

        ids [N, K], log_probs [N, K], log_tail [N].
        Raises DraftsmithError or UsageError, in one line, where the server fails or refuses.
        """
        laws = run(self._laws([examples[member].input_ids for member in members]))
        parts = [self._rows(examples[member], law) for member, law in zip(members, laws, strict=True)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    async def _laws(self, texts: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        async with Client(self.server) as client:
            jobs = [partial(self._law, client, ids) for ids in texts]
            return [law async for ready in in_order(jobs, self.server.concurrency) for law in ready]

    async def _law(self, client: Client, ids: list[int]) -> list[dict[int, float]]:
        request = scoring_request(self.served.model, ids, self.top_k)
        return top_log_probs(await client.post("/completions", request), request, self.vocab_size)

    def _rows(self, example: Example, laws: list[dict[int, float]]) -> dict[str, Tensor]:
        places = [place for place in range(1, len(example.input_ids)) if example.mask[place]]
        kept = [laws[place - 1] for place in places]
        log_probs = torch.tensor([list(law.values()) for law in kept], dtype=torch.float64).reshape(
            len(kept), self.top_k
        )
        return {
            "ids": torch.tensor([list(law) for law in kept], dtype=torch.int32).reshape(len(kept), self.top_k),
            "log_probs": log_probs.float(),
            "log_tail": log_tail_of(log_probs, complete=self.top_k == self.vocab_size).float(),
        }


def log_tail_of(log_probs: Tensor, *, complete: bool) -> Tensor:
    """log(1 - sum of exp(log_probs)) [N] for log_probs [N, K] fp64; -inf where the K are `complete`, all there are."""
    if complete:
        return log_probs.new_full(log_probs.shape[:1], -torch.inf)
    return (-torch.expm1(log_probs.logsumexp(-1))).clamp(min=SMALLEST_TAIL).log()
