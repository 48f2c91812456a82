"""Other packages' decoders, where they are installed: what they are told, and what they answer, in our terms."""

from importlib.util import find_spec
from typing import Any

import torch

from decode.benchmark import Answer, Method
from decode.config import DecodeConfig, SamplingConfig
from decode.draft import Round
from decode.errors import UsageError
from decode.generation import sampling_of
from decode.models import LoadedModel
from decode.prepare import ending_ids
from decode.stats import Stats


def flashspec_method(
    name: str, target: LoadedModel, draft: Any, config: DecodeConfig, num_tokens: int | None = None
) -> Method:
    """flashspec's engine on the models as they were loaded; `draft` is a whole model.

    `num_tokens`: drafted in every round; None: the package's own defaults, which look into the prompt first.
    Raises UsageError where the package is not installed, or cannot sample as `config` asks.
    """
    if find_spec("flashspec") is None:
        raise UsageError(f"methods: {name} needs the package flashspec, which is not installed; pip install flashspec")
    if draft.device != target.device:
        raise UsageError(f"methods: {name} needs one device for both models, not {target.device} and {draft.device}")
    sampling = config.sampling or sampling_of(target.model.generation_config)
    if not sampling.greedy and sampling != SamplingConfig(temperature=sampling.temperature):
        raise UsageError(
            f"methods: {name} can sample by temperature only; leave it out, or the other sampling settings"
        )
    eos = sorted(ending_ids(target, config))
    temperature = 0.0 if sampling.greedy else sampling.temperature
    engine_of = _Engines(target, draft, temperature, num_tokens)

    def run(prompt: list[int], max_new_tokens: int, seed: int | None = None) -> Answer:
        engine = engine_of(config.seed if seed is None else seed)
        ids = torch.tensor([prompt], device=target.device)
        done = engine.generate(ids, max_new_tokens=max_new_tokens, eos_token_ids=eos)
        steps = [Round(0, [0] * s.proposed, s.accepted, [0] * s.emitted) for s in done.arm_steps]
        return Answer([token for token in done.output_ids[0].tolist() if token >= 0], Stats.of(steps))

    return Method(name, run)


class _Engines:
    """An engine for each seed, all on the same two wrapped models: a seed is part of an engine's settings."""

    def __init__(self, target: LoadedModel, draft: Any, temperature: float, num_tokens: int | None) -> None:
        from flashspec.engine.hf_drafter import HuggingFaceDrafter
        from flashspec.engine.verifier import TargetModel

        self._device = str(target.device)
        self._target = TargetModel(target.name, target.device, target.model.dtype, model=target.model)
        self._draft = HuggingFaceDrafter("draft", target.device, draft.dtype, temperature, model=draft)
        self._temperature, self._num_tokens = temperature, num_tokens
        self._made: dict[int | None, Any] = {}

    def __call__(self, seed: int | None) -> Any:
        if self._temperature == 0:
            seed = None
        if seed not in self._made:
            self._made[seed] = self._make(seed)
        return self._made[seed]

    def _make(self, seed: int | None) -> Any:
        import flashspec

        sampling: dict[str, Any] = {"temperature": self._temperature, "seed": seed}
        strategy: dict[str, Any] = {}
        if self._num_tokens is not None:
            sampling["gamma"] = self._num_tokens
            strategy = {"drafter_strategy": "bandit", "bandit": flashspec.BanditConfig(n_arms=1)}
        settings = flashspec.FlashSpecConfig(
            device=self._device, sampling=flashspec.SamplingConfig(**sampling), **strategy
        )
        return flashspec.SpeculativeEngine(settings, [self._draft], self._target)
