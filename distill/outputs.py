"""Tries, before anything costly is done, whether a place can be written to at all. Leaves nothing there."""

import os
import tempfile
from pathlib import Path

from decode.errors import UsageError


def check_writable(output: Path) -> None:
    """Raises UsageError, naming what is in the way, where no file or folder can be made or replaced at `output`."""
    place = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not place.is_dir():
        raise UsageError(f"output: {output} cannot be written: {place} is no folder")
    try:
        Path(tempfile.mkdtemp(prefix=".draftsmith-", dir=place)).rmdir()  # what os.access allows may fail all the same
        writable = not output.is_file() or os.access(output, os.W_OK)
    except OSError as error:
        raise UsageError(f"output: {output} cannot be written: {place}: {error.strerror}") from error
    if not writable:
        raise UsageError(f"output: {output} cannot be written to")
