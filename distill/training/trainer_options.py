"""What `trainer:` may say: options passed on to lightning's Trainer, and refusals that name the right key instead."""

import difflib
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
from lightning import Trainer
from lightning.fabric.plugins.precision import precision as lightning_precision
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from decode.config import ModelConfig
from decode.errors import UsageError, require
from decode.models import choose_device
from distill.training.sharding import ShardedStrategy

# With ddp each process holds the whole draft; with fsdp2 they share one. What would save pieces that no other number of
# processes resumes from is left out. Processes that are spawned or forked would share the lock of the run's folder.
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "fsdp2")
_FOLDERS = "it writes folders that no other number of processes continues from; fsdp2 shards the draft and can"
# Other names of lightning's for what people will look for, and why not.
REFUSED = {
    **{name: _FOLDERS for name in StrategyRegistry.available_strategies() if name.startswith("deepspeed")},
    **{name: "it is the older FSDP; use fsdp2" for name in StrategyRegistry.available_strategies() if "fsdp" in name},
    "model_parallel": "it needs a plan for each model; use fsdp2",
}
PRECISIONS: tuple[str, ...] = get_args(lightning_precision._PRECISION_INPUT_STR)
OTHER_NAMES = (*get_args(lightning_precision._PRECISION_INPUT_STR_ALIAS), 64, 32, 16)
PROFILERS = ("simple", "advanced", "pytorch")


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not _is_switch(value) and value >= least


def _are_devices(value: Any) -> bool:
    if not isinstance(value, list):
        return value == "auto" or _is_count(value)
    return all(_is_count(number, 0) for number in value) and len(set(value)) == len(value) > 0


def _is_duration(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return value is None or re.fullmatch(r"\d{1,6}:\d\d:\d\d:\d\d", value.strip()) is not None
    try:
        return isinstance(value, dict) and len(value) > 0 and timedelta(**value) >= timedelta(0)
    except (TypeError, ValueError, OverflowError):
        return False


# Options of lightning's Trainer: a test of the value, and what is legal.
PASSED_ON: dict[str, tuple[Callable[[Any], bool], str]] = {
    "benchmark": (lambda v: v is None or _is_switch(v), "true, false or null"),
    "detect_anomaly": (_is_switch, "true or false"),
    "deterministic": (lambda v: v is None or v == "warn" or _is_switch(v), "true, false, warn or null"),
    "devices": (_are_devices, "an integer >= 1, auto, or a list of device numbers"),
    "enable_model_summary": (_is_switch, "true or false"),
    "enable_progress_bar": (_is_switch, "true or false"),
    "gradient_clip_algorithm": (lambda v: v in (None, "norm", "value"), "norm, value or null"),
    "log_every_n_steps": (_is_count, "an integer >= 1"),
    "logger": (lambda v: v is None or v is False or v == "tensorboard", "tensorboard, or null"),
    "max_time": (_is_duration, "'DD:HH:MM:SS', or units of time such as {hours: 12}"),
    "num_nodes": (_is_count, "an integer >= 1"),
    "precision": (lambda v: v in (None, *PRECISIONS, *OTHER_NAMES), "one of " + ", ".join(PRECISIONS)),
    "profiler": (lambda v: v in (None, *PROFILERS), ", ".join(PROFILERS) + " or null"),
    "strategy": (lambda v: v in STRATEGIES, f"one of {', '.join(STRATEGIES)}"),
}
OUR_KEYS = {
    "accelerator": "model.device",
    "accumulate_grad_batches": "optimizer.accumulate",
    "check_val_every_n_epoch": "judge.every_n_steps",
    "default_root_dir": "output",
    "enable_checkpointing": "judge.every_n_steps",
    "gradient_clip_val": "optimizer.gradient_clip",
    "max_epochs": "max_epochs",
    "max_steps": "max_steps",
    "min_epochs": "max_epochs",
    "min_steps": "max_steps",
    "val_check_interval": "judge.every_n_steps",
}
# Order, counts and checkpoints of a run rest on these.
FIXED = (
    "barebones",
    "callbacks",
    "enable_autolog_hparams",
    "fast_dev_run",
    "inference_mode",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "model_registry",
    "num_sanity_val_steps",
    "overfit_batches",
    "plugins",
    "reload_dataloaders_every_n_epochs",
    "sync_batchnorm",
    "use_distributed_sampler",
)
LOG_EVERY_N_STEPS = 10


def check_options(options: dict[str, Any]) -> None:
    """Raise UsageError for an option that is unknown, has a key of ours, is fixed, or has an illegal value."""
    for name, value in options.items():
        if name in OUR_KEYS:
            raise UsageError(f"trainer.{name}: set {OUR_KEYS[name]} instead")
        if name in FIXED:
            raise UsageError(f"trainer.{name}: is fixed, a run's order and resuming rest on it; legal: {_legal()}")
        if name not in PASSED_ON:
            near = difflib.get_close_matches(str(name), [*PASSED_ON, *OUR_KEYS], n=1)
            hint = f"did you mean {OUR_KEYS.get(near[0], f'trainer.{near[0]}')}?" if near else f"legal: {_legal()}"
            raise UsageError(f"trainer.{name}: unknown; {hint}")
        if name == "strategy" and str(value) in REFUSED:
            raise UsageError(f"trainer.strategy: {str(value)!r} is not offered: {REFUSED[str(value)]}")
        is_legal, legal = PASSED_ON[name]
        require(is_legal(value), f"trainer.{name}", value, legal)


def _legal() -> str:
    return ", ".join(PASSED_ON)


class SegmentTimer(Timer):
    """Ends a run at the first checkpoint after max_time. Each start counts its own time and reaches one checkpoint."""

    def __init__(self, max_time: Any) -> None:
        super().__init__(max_time, interval="epoch", verbose=False)

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        """No stop before the first checkpoint, where a run would never get on."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing was kept."""


def make_trainer(
    options: dict[str, Any], model: ModelConfig, folder: Path, callbacks: list[Callback], **fixed: Any
) -> Trainer:
    """A Trainer whose epochs are segments: checked options of the user's, then what a run rests on.

    Raises UsageError for options that do not go together, or not with this machine.
    """
    given = {"log_every_n_steps": LOG_EVERY_N_STEPS, **device_options(model), **options}
    max_time, logger = given.pop("max_time", None), given.pop("logger", None)
    given.pop("enable_progress_bar", None)  # our own bar, over the whole run
    if given.get("strategy") == "fsdp2":
        given |= _sharded(given["precision"])
    try:
        if max_time is not None:
            callbacks = [*callbacks, SegmentTimer(max_time)]
        return Trainer(
            **given,
            **fixed,
            callbacks=callbacks,
            logger=tensorboard(folder) if logger else False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            inference_mode=False,  # nothing that validation leaves behind may be unfit for training
            check_val_every_n_epoch=1,
        )
    except (ValueError, TypeError, AttributeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UsageError(f"trainer: {' '.join(str(error).split())}") from error


def _sharded(precision: Any) -> dict[str, Any]:
    """Lightning knows no 64-true here; its 32-true leaves weights and batches as they are, in float64 too."""
    return {"strategy": ShardedStrategy(), "precision": "32-true" if precision == "64-true" else precision}


def device_options(model: ModelConfig) -> dict[str, Any]:
    """Accelerator, devices and precision for where the models live; one device unless trainer.devices says more."""
    device = choose_device(model)
    accelerator = {"cuda": "gpu"}.get(device.type, device.type)
    devices: Any = 1 if device.index is None else [device.index]
    options = {"accelerator": accelerator, "devices": devices, "precision": precision(device, model)}
    return {"enable_model_summary": False, **options}


def precision(device: torch.device, model: ModelConfig) -> str:
    """bf16-mixed on GPUs that have bf16; full precision elsewhere: CPUs mostly run bf16 slower."""
    if model.dtype == "float64":
        return "64-true"
    return "bf16-mixed" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "32-true"


def tensorboard(folder: Path) -> TensorBoardLogger:
    """A logger into <folder>/tensorboard. Raises UsageError when the package is missing."""
    try:
        return TensorBoardLogger(save_dir=folder, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise UsageError(
            "trainer.logger: tensorboard is not installed; pip install 'draftsmith[tensorboard]'"
        ) from error
