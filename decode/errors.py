"""Errors that a user can mend; each carries the exit status that the command line returns."""


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
    """What a library's error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def require(condition: bool, key: str, value: object, legal: str) -> None:
    """Raise UsageError naming `key`, its `value` and what is `legal` unless `condition` holds."""
    if not condition:
        raise UsageError(f"{key}: {value!r} is not legal; expected {legal}")
