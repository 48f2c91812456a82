"""How recorded acceptance is spoken of, the same in tables, pictures and model cards."""

from collections.abc import Iterable, Mapping
from typing import Any

# What a run records of each checkpoint, with the upper bound that a cached teacher leaves beside it.
BOUNDED = ("expected_acceptance", "greedy_acceptance")
SHOWN_GAP = 5e-4  # bounds that are closer print as one figure


def recorded_bounds(recorded: Mapping[str, Any]) -> dict[str, float | None]:
    """Every acceptance, with its upper bound where it has one, of what a run recorded; None where it did not."""
    names = [*(f"{name}{end}" for name in BOUNDED for end in ("", "_upper")), "greedy_agreement"]
    return {name: recorded.get(f"val/{name}") for name in names}


def said_of(temperatures: Iterable[float | None]) -> str:
    """What the acceptances of runs at these loss temperatures are, in a phrase."""
    known = {t for t in temperatures if t is not None}
    at = f"at temperature {known.pop():g}" if len(known) == 1 else "at the run's loss temperature"
    return f"{at}, a lower bound where the teacher is cached"


def figure(value: float, upper: float | None = None) -> str:
    return f"{value:.3f}" if upper is None or upper - value < SHOWN_GAP else f"{value:.3f} to {upper:.3f}"
