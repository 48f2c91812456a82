"""A model's logits as laws: the one place where vocabulary, history-dependent processors and sampling meet."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.config import SamplingConfig
from decode.laws import Law
from decode.processors import Processors
from decode.sampling import law_of
from decode.vocabulary import Vocabulary

SOFT = SamplingConfig(temperature=1.0)


@dataclass(frozen=True)
class Sampler:
    """How one text's tokens are drawn from a model's logits. The same settings serve target and draft."""

    sampling: SamplingConfig
    vocabulary: Vocabulary
    processors: Processors | None = None
    vocab_ids: Tensor | None = None  # [N] ids that the rows of a narrowed head stand for; None: the head is whole

    def law(
        self,
        logits: Tensor,  # [R, V or N]
        tokens: Tensor,  # [>= n] of the text
        length: int,  # n: the last row follows the first n tokens, row i the first n - R + 1 + i
    ) -> Law:
        """The laws that the tokens after each position are drawn from."""
        return law_of(self._processed(logits, tokens, length), self.sampling, self.vocab_ids)

    def soft_law(self, logits: Tensor, tokens: Tensor, length: int) -> Law:
        """As `law`, but greedy decoding's too shows how sure the model is."""
        sampling = SOFT if self.sampling.greedy else self.sampling
        return law_of(self._processed(logits, tokens, length), sampling, self.vocab_ids)

    def _processed(self, logits: Tensor, tokens: Tensor, length: int) -> Tensor:
        if self.vocab_ids is None:
            logits = self.vocabulary.cut(logits)
            return logits if self.processors is None else self.processors(logits, tokens[:length])
        if self.processors is None:
            return logits  # a narrowed head stands for real tokens only
        wide = logits.new_full((logits.shape[0], self.vocabulary.size), float("-inf"))
        wide[:, self.vocab_ids] = logits
        processed = self.processors(wide, tokens[:length])[:, self.vocab_ids]
        # Where everything that is allowed lies outside the subset, any draft will do: the target rejects it.
        return torch.where(processed.amax(-1, keepdim=True) == float("-inf"), logits, processed)
