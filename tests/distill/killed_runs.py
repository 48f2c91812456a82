"""A program for test_resume: runs fit in child processes that kill themselves with SIGKILL at named points.

Everything is imported and warm when it forks, and torch has one thread, so children start at once and safely. Usage:
killed_runs.py FOLDER, where FOLDER holds target, draft and rows.jsonl; it makes FOLDER/whole, which is not killed, and
FOLDER/killed, which is killed at every one of `points`.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distill.teacher import scoring
from distill.teacher.store import Store
from distill.training import callbacks
from distill.training.fit import fit
from distill.training.history import Table
from distill.training.module import Distillation
from tests.fit_runs import fit_config


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner: Any, name: str, number: int, doing: Callable[..., Any]) -> None:
    """Let `doing(original, *args)` take the place of the `number`-th call of owner.name."""
    original, calls = getattr(owner, name), [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return doing(original, *args, **kwargs) if calls[0] == number else original(*args, **kwargs)

    setattr(owner, name, wrapper)


def half_a_file(original: Any, trainer: Any, path: Path, **kwargs: Any) -> None:
    original(trainer, path, **kwargs)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    kill()


def half_a_shard(original: Any, store: Store, name: str, tensors: Any) -> None:
    store.path(name).with_suffix(".tmp").write_bytes(b"half a shard")
    kill()


def after(original: Any, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    kill()


def torn_row(original: Any, table: Table, row: Any) -> None:
    with table.path.open("a") as file:
        file.write("99,1")
    kill()


def points() -> dict[str, Callable[[], None]]:
    from lightning import Trainer

    return {
        "a shard half written": lambda: on_call(Store, "write", 2, half_a_shard),
        "the untrained draft's row written": lambda: on_call(Table, "append", 1, after),
        "the first step": lambda: on_call(Distillation, "training_step", 1, after),
        "a row written, its checkpoint not": lambda: on_call(Table, "append", 4, after),  # rows 0; steps 1, 2; row 2
        "a checkpoint half written": lambda: on_call(Trainer, "save_checkpoint", 2, half_a_file),
        "a checkpoint written, best.json not": lambda: on_call(callbacks, "write_best", 1, lambda *_: kill()),
        "inside an accumulation window": lambda: on_call(Distillation, "training_step", 2, after),
        "a row torn": lambda: on_call(Table, "append", 2, torn_row),
        "the last checkpoint written, last.ckpt and best.json not": lambda: on_call(
            callbacks, "link_last", 1, lambda *_: kill()
        ),
    }


def child(folder: Path, output: str, arm: Callable[[], None]) -> int:
    """Run fit in a forked process; the signal that ended it, 0 for a run that came to its end."""
    process = os.fork()
    if process == 0:
        try:
            arm()
            fit(fit_config(folder, output=str(folder / output)))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(process, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    scoring.SHARD_POSITIONS = 40  # several shards
    fit(fit_config(folder, output=str(folder / "whole")))
    for name, arm in points().items():
        print(name, child(folder, "killed", arm))
    print("last", child(folder, "killed", lambda: None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
