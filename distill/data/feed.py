"""Chooses the data module that a run's settings ask for, and tells what it will give."""

import hashlib

from distill.config import FitConfig
from distill.data.extra import Extra
from distill.data.module import DraftDataModule
from distill.data.split import Data
from distill.data.stream_module import StreamedDataModule


def make_feed(data: Data, config: FitConfig, extra: Extra | None = None) -> DraftDataModule:
    """Batches from rows in memory, with extra examples where there are any, or from a stream.

    Raises ValueError for a stream with extra examples.
    """
    if data.stream is None:
        return DraftDataModule(data.train, data.validation, config, extra)
    if extra is not None:
        raise ValueError("extra examples can't join streamed ones")
    return StreamedDataModule(data.stream, data.report, data.validation, config)


def data_lines(data: Data, feed: DraftDataModule, config: FitConfig) -> list[str]:
    """What a run is about to train and to be validated on, in words."""
    held_out, sequences = data.validation_report, config.data.batch_size * config.optimizer.accumulate
    streamed = f"streamed, {config.data.shuffle_buffer} rows at a time; the first {data.report.num_rows}:"
    validation = (
        f"{len(data.validation)} examples held out, {sum(e.num_supervised for e in data.validation)} supervised"
    )
    return [
        *([f"data: {streamed}"] if data.stream else []),
        *(f"data: {line}" for line in data.report.lines()),
        *(f"validation: {line}" for line in (held_out.lines() if held_out else [f"{validation} tokens"])),
        f"run: {feed.num_steps} steps of {sequences} sequences ({config.data.batch_size} in a batch, "
        f"{config.optimizer.accumulate} accumulated){_told_of_epochs(feed)}; {_told_of_rows(feed)}",
    ]


def _told_of_epochs(feed: DraftDataModule) -> str:
    return "" if feed.num_epochs is None else f", {feed.num_epochs:.1f} epochs"


def _told_of_rows(feed: DraftDataModule) -> str:
    kind = f"packed up to {feed.max_length} tokens" if feed.packing else "one example each"
    extra = "" if feed.extra is None else f", {100 * feed.extra.share:.1f} % of them extra"
    return f"{kind}{extra}, {100 * feed.padding_share:.1f} % padding"


def content_sha256(data: Data, examples_sha256: str) -> str:
    """A run's data in one checksum: `examples_sha256` of the rows in memory, with their weights and the stream's files.

    It is `examples_sha256` itself where there is nothing else.
    """
    further = [repr(e.weights) for e in (*data.train, *data.validation) if e.weights is not None]
    further += [] if data.stream is None else [data.stream.sha256()]
    return hashlib.sha256("".join([examples_sha256, *further]).encode()).hexdigest() if further else examples_sha256
