"""The strategy `fsdp2`: every process keeps a part of each weight, and of its gradient and its optimiser state.

Checkpoints are those of a single process: whole weights and an ordinary optimiser state in one file, which any number
of processes, sharded or not, continues from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from decode.models import some_of
from distill.student import Student
from distill.training.prepare import decoder_layers


class ShardedStrategy(ModelParallelStrategy):
    """All processes of all nodes share one copy of the draft; what is saved and loaded is whole."""

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return self._whole(self.model.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._whole(getattr(optimizer, "optimizer", optimizer).state_dict())

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` with its sharded tensors gathered, on rank 0, which writes them; elsewhere they are left out."""

        def gather(part: DTensor) -> Tensor:
            whole = part.full_tensor().detach()
            return whole.cpu() if self.global_rank == 0 else torch.empty(0)

        return tree_map_only(DTensor, gather, state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read by each process from the file itself, of which it keeps its own parts."""
        content: dict[str, Any] = torch.load(Path(checkpoint_path), map_location="cpu", weights_only=True, mmap=True)
        assert self.model is not None and self.lightning_module is not None
        load_weights(self.model, content["state_dict"], self.lightning_module.strict_loading)
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=False):
            optimizer.load_state_dict(sharded_state(optimizer, state))
        return content


def shard(student: Student, mesh: DeviceMesh) -> None:
    """Spread the student's weights over `mesh` in place; each decoder layer is gathered by itself when it runs.

    Losses, head and final norm run inside the student's own forward, where its remaining weights are whole.
    """
    for layer in decoder_layers(student.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(student, mesh=mesh)
    register_fsdp_forward_method(student, "measure")


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


@torch.no_grad()
def load_weights(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Copy whole tensors into a module's sharded ones, by name; all of them where `strict`.

    Raises RuntimeError naming weights that are missing or unknown.
    """
    own = module.state_dict()
    wrong = own.keys() ^ state.keys() if strict else state.keys() - own.keys()
    if wrong:
        raise RuntimeError(f"the checkpoint's weights are not the draft's: {some_of(wrong)}")
    for name, whole in state.items():
        own[name].copy_(_like(whole, own[name]))


def sharded_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An ordinary optimiser state with what has a parameter's shape spread as that parameter is."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = dict(zip(saved, own, strict=True))

    def spread(number: int, value: Any) -> Any:
        is_whole = isinstance(value, Tensor) and value.shape == parameters[number].shape
        return _like(value, parameters[number]) if is_whole else value

    spread_out = {n: {key: spread(n, value) for key, value in kept.items()} for n, kept in state["state"].items()}
    return {**state, "state": spread_out}


def _like(whole: Tensor, other: Tensor) -> Tensor:
    """`whole` spread over processes as `other` is; every process has it, so nothing is sent."""
    if not isinstance(other, DTensor):
        return whole
    return distribute_tensor(whole.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The module's weights, gathered: for all processes to call at once."""
    return tree_map_only(DTensor, lambda part: part.full_tensor().detach(), module.state_dict())
