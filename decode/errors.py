"""Errors that a user can mend; each carries the exit status that the command line returns."""

from collections.abc import Iterable


class DraftsmithError(Exception):
    """A failure at run time, told in one line; exit status 1."""

    exit_status = 1


class UsageError(DraftsmithError):
    """A mistake in options, configuration, files or the pair of models; exit status 2."""

    exit_status = 2


class IncompatiblePair(UsageError):
    """A draft whose ids do not mean what the target's mean; exit status 3."""

    exit_status = 3


def first_line(error: Exception) -> str:
    """What a library's error says, in one line. A first line that ends in a colon only announces the next one."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return " ".join(lines[0].split() + (lines[1].split() if lines[0].rstrip().endswith(":") and lines[1:] else []))


def unhealthy(role: str, other_causes: str = "") -> DraftsmithError:
    """What is raised where a model's logits define no law. `role` is "target" or "draft"."""
    return DraftsmithError(f"{role}: its logits are NaN or infinite; its weights or dtype are at fault{other_causes}")


def require(condition: bool, key: str, value: object, legal: str) -> None:
    """Raise UsageError naming `key`, its `value` and what is `legal` unless `condition` holds."""
    if not condition:
        raise UsageError(f"{key}: {value!r} is not legal; expected {legal}")


def require_least(config: object, section: str = "", **least: int) -> None:
    """Refuse each named integer of `config` below its least value, or too large; null passes where it's a default."""
    for key, bound in least.items():
        value = getattr(config, key)
        legal = value is None or (isinstance(value, int) and bound <= value < 2**63)
        require(legal, f"{section}{key}", value, f"an integer >= {bound}")


def require_choices(config: object, **choices: Iterable[object]) -> None:
    """Refuse each named value of `config` that is none of its choices."""
    for key, legal in choices.items():
        require(getattr(config, key) in legal, key, getattr(config, key), f"one of {', '.join(map(str, legal))}")


def require_between(config: object, section: str = "", **bounds: tuple[int, int]) -> None:
    """Refuse each named integer of `config` outside its bounds; null passes where it's a default."""
    for key, (least, most) in bounds.items():
        value = getattr(config, key)
        require(value is None or least <= value <= most, f"{section}{key}", value, f"an integer from {least} to {most}")
