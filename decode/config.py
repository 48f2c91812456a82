"""Settings of the decoder: frozen dataclasses, every range checked on construction. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from decode.draft_length import DRAFT_LENGTHS, FIXED_LENGTH, LONGEST_DRAFT
from decode.errors import require, require_choices, require_least

VerifierName = Literal["auto", "token", "block"]
BackendName = Literal["auto", "eager", "prepacked", "lean", "compiled", "cuda_graph"]
DTypeName = Literal["auto", "float32", "float64", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "bnb-8bit", "bnb-4bit"]


# Below it the law is a point mass to every purpose, and transformers' own fp32 division of logits nears overflow.
SMALLEST_TEMPERATURE = 1e-6
LARGEST = 1e9  # of what is added to logits or multiplied with them, which are fp32


@dataclass(frozen=True)
class SamplingConfig:
    """How logits become probabilities, in transformers' order: penalties and bans, then temperature, top-k, top-p,
    min-p, typical-p."""

    temperature: float = 0.0
    """0 is greedy: all mass on the argmax. So is whatever lies below 1e-6."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest; 0 drops none."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest the law's entropy until their mass reaches this; 1 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in prompt or text are divided by it where positive, else multiplied; 1 is none."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it occurs in the text so far, the prompt apart."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that occurs in the text so far, the prompt apart."""
    no_repeat_ngram_size: int = 0
    """No run of this many tokens occurs twice in prompt and text; 0 allows all."""
    bad_words_ids: list[list[int]] = field(default_factory=list)
    """Runs of token ids that are never completed."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """Token id (a number as text, as in JSON) to what is added to its logit."""
    allowed_ids: list[int] = field(default_factory=list)
    """Only these token ids may be produced; empty allows all."""
    min_new_tokens: int = 0
    """No end-of-text id before this many new tokens."""

    def __post_init__(self) -> None:
        require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "a finite number >= 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        require(0 < self.typical_p <= 1, "typical_p", self.typical_p, "a number in (0, 1]")
        penalty = self.repetition_penalty
        require(1 / LARGEST <= penalty <= LARGEST, "repetition_penalty", penalty, f"{1 / LARGEST:g} to {LARGEST:g}")
        for key in ("frequency_penalty", "presence_penalty"):
            require(abs(getattr(self, key)) <= LARGEST, key, getattr(self, key), f"-{LARGEST:g} to {LARGEST:g}")
        require_least(self, top_k=0, no_repeat_ngram_size=0, min_new_tokens=0)
        for key in self.logit_bias:
            require(str(key).isdecimal(), "logit_bias", key, "token ids as keys")
        for bias in self.logit_bias.values():
            legal = f"numbers from -{LARGEST:g} to {LARGEST:g} (a token is banned by bad_words_ids)"
            require(abs(bias) <= LARGEST, "logit_bias", bias, legal)
        for run in self.bad_words_ids:
            require(len(run) > 0 and min(run) >= 0, "bad_words_ids", run, "runs of at least one token id >= 0")
        require(min(self.allowed_ids, default=0) >= 0, "allowed_ids", self.allowed_ids, "token ids >= 0")

    @property
    def greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE


@dataclass(frozen=True)
class DecodeConfig:
    """One decoding call."""

    max_new_tokens: int | None = 128
    """null: until the target's context is full."""
    num_speculative_tokens: int | None = None
    """Tokens drafted per round; where draft_length chooses, the most that a round may draft; 0 is plain decoding.
    null: 3 for fixed, 8 for the others."""
    draft_length: str = "cost_model"
    """fixed; heuristic: as transformers; confidence, entropy: stop where the draft is unsure; cost_model: what the
    measured costs and the acceptance so far make fastest, plain decoding where that is fastest."""
    draft_threshold: float | None = None
    """confidence: stop where the draft's likeliest token is less likely than this (null: 0.4); entropy: stop where
    the lower bound on acceptance is below this (null: 0.2)."""
    verifier: VerifierName = "auto"
    """auto: the block rule for sampled drafts, the token rule for greedy ones."""
    sampling: SamplingConfig | None = None
    """null: as the target's own generation config says, which for most models is greedy."""
    draft_sampling: SamplingConfig | None = None
    """How the draft's tokens are drawn; null: as the target's. Any choice leaves the output law unchanged."""
    stop_strings: list[str] = field(default_factory=list)
    """A text ends with the token that completes any of these."""
    eos_token_ids: list[int] | None = None
    """Ids that end a text; null: the target's own; an empty list: none."""
    seed: int | None = None
    """null draws a fresh seed for each call; ignored by greedy decoding."""
    batch_size: int = 1
    """Prompts decoded together."""
    log_probs: bool = False
    """Report each new token's log-probability under the target, before penalties, temperature and filters."""

    def __post_init__(self) -> None:
        require_choices(self, draft_length=DRAFT_LENGTHS, verifier=get_args(VerifierName))
        tokens, k = self.max_new_tokens, self.num_speculative_tokens
        whole = tokens is None or (isinstance(tokens, int) and 0 <= tokens < 2**31)
        require(whole, "max_new_tokens", tokens, "an integer >= 0, or null")
        whole = k is None or (isinstance(k, int) and 0 <= k <= 64)
        require(whole, "num_speculative_tokens", k, "an integer from 0 (plain decoding) to 64")
        threshold, policy = self.draft_threshold, DRAFT_LENGTHS[self.draft_length]
        require(threshold is None or 0 <= threshold <= 1, "draft_threshold", threshold, "a number in [0, 1]")
        by_threshold = ", ".join(name for name, each in DRAFT_LENGTHS.items() if hasattr(each, "default_threshold"))
        legal = f"null, unless draft_length is one of {by_threshold}"
        require(threshold is None or hasattr(policy, "default_threshold"), "draft_threshold", threshold, legal)
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "an integer >= 0, or null")
        require(min(self.eos_token_ids or [0]) >= 0, "eos_token_ids", self.eos_token_ids, "token ids >= 0, or null")
        require(all(self.stop_strings), "stop_strings", self.stop_strings, "strings that are not empty")
        require_least(self, batch_size=1)

    @property
    def most_drafted(self) -> int:
        """The most tokens that a round may draft."""
        if self.num_speculative_tokens is None:
            return FIXED_LENGTH if self.draft_length == "fixed" else LONGEST_DRAFT
        return self.num_speculative_tokens


@dataclass(frozen=True)
class ModelConfig:
    """How models are loaded."""

    device: str = "auto"
    """auto: CUDA when there is one, else the CPU; or a torch device such as cuda:1."""
    draft_device: str | None = None
    """Where the draft lies; null: where the target does."""
    device_map: str | None = None
    """Spread a target that is larger than one device, as accelerate does: auto, balanced, sequential."""
    max_memory: dict[str, str] = field(default_factory=dict)
    """With device_map: the most memory to use of each device, such as {"0": "20GiB", "cpu": "60GiB"}."""
    dtype: DTypeName = "auto"
    """auto: float32 on the CPU, the checkpoint's own type on a GPU."""
    backend: BackendName = "auto"
    """auto: the fastest by measuring, among those that can serve the model on its device."""
    quantization: QuantizationName = "none"
    """Weights of the target: int8 (torchao, weight-only), bnb-8bit, bnb-4bit (bitsandbytes)."""
    draft_quantization: QuantizationName = "none"
    draft_vocab_size: int | None = None
    """The draft proposes only this many tokens, the most frequent ones of draft_vocab_data among those that it can;
    null: all of them. The output law is the target's all the same."""
    draft_vocab_data: str | None = None
    """A .jsonl file that generate wrote, whose generated tokens are counted; it and draft_vocab_size go together."""
    trust_remote_code: bool = False
    """Run code that ships with a model from the hub. Off unless asked."""

    def __post_init__(self) -> None:
        require_least(self, draft_vocab_size=1)
        if (self.draft_vocab_size is None) != (self.draft_vocab_data is None):
            lacking = "draft_vocab_size" if self.draft_vocab_size is None else "draft_vocab_data"
            require(False, lacking, None, "a value: draft_vocab_size and draft_vocab_data go together")
        kinds = get_args(QuantizationName)
        require_choices(self, dtype=get_args(DTypeName), backend=get_args(BackendName))
        require_choices(self, quantization=kinds, draft_quantization=kinds)
        legal = (None, "auto", "balanced", "balanced_low_0", "sequential")
        require(
            self.device_map in legal,
            "device_map",
            self.device_map,
            "auto, balanced, balanced_low_0, sequential or null",
        )
        require(
            not self.max_memory or self.device_map is not None, "max_memory", self.max_memory, "{} without device_map"
        )
