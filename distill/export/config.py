"""Settings of `draftsmith export`. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from decode.errors import require_least


@dataclass(frozen=True)
class ExportConfig:
    """`draftsmith export`: write the draft as a plain model directory."""

    draft: str
    """A .ckpt file, a run folder (its best checkpoint), or a draft directory."""
    target: str
    output: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the dtype of the draft's own weights."""
    num_assistant_tokens: int | None = None
    """Written to the generation config; null: the draft length that the run was judged with, else 3."""
    evaluation: str | None = None
    """Folder that eval wrote, for the model card; null: the newest one inside or beside the run that measured it."""
    trust_remote_code: bool = False
    """Run code that ships with a model from the hub. Off unless asked."""

    def __post_init__(self) -> None:
        require_least(self, num_assistant_tokens=1)
