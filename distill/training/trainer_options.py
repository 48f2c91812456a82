"""What `trainer:` may say: options passed on to lightning's Trainer, and refusals that name the right key instead."""

import difflib
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from decode.config import ModelConfig
from decode.errors import UsageError, require
from decode.models import choose_device

PASSED_ON = (
    "benchmark",
    "detect_anomaly",
    "deterministic",
    "devices",
    "enable_model_summary",
    "enable_progress_bar",
    "gradient_clip_algorithm",
    "log_every_n_steps",
    "logger",
    "max_time",
    "num_nodes",
    "precision",
    "profiler",
    "strategy",
)
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
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
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
        if name == "strategy":
            require(value in STRATEGIES, "trainer.strategy", value, "one of " + ", ".join(STRATEGIES))
        if name == "logger":
            require(value in (None, False, "tensorboard"), "trainer.logger", value, "tensorboard, or null")
    every = options.get("log_every_n_steps", LOG_EVERY_N_STEPS)
    require(isinstance(every, int) and every >= 1, "trainer.log_every_n_steps", every, "an integer >= 1")


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
    """A Trainer whose epochs are segments: checked options of the user's, then what a run rests on."""
    given = {"log_every_n_steps": LOG_EVERY_N_STEPS, **device_options(model), **options}
    max_time, logger = given.pop("max_time", None), given.pop("logger", None)
    given.pop("enable_progress_bar", None)  # our own bar, over the whole run
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
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise UsageError(f"trainer: {' '.join(str(error).split())}") from error


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
