"""Any forward over slots as CUDA graphs: one launch for a step, or for all steps of a draft.

Everything but the capture runs on the CPU too, where a run is made by calling it.
"""

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from decode.backends.base import Forward
from decode.backends.static import FewWidths, StaticSlots, try_out
from decode.errors import first_line
from decode.laws import Law

WIDTHS = (1, 2, 4, 8, 16)
WARM_UP_RUNS = 2  # kernels choose their algorithms and take their workspaces before a capture
MOST_LOOPS = 32  # draft loops that are kept: each holds device memory, and there is one for each length and setting

log = logging.getLogger(__name__)

T = TypeVar("T")
Capture = Callable[[Callable[[], T]], Callable[[], T]]
# From logits [1, N] and a number in [0, 1), [1] fp64: the drawn token [1] and the law it was drawn from.
Draw = Callable[[Tensor, Tensor], tuple[Tensor, Law]]


def call(run: Callable[[], T]) -> Callable[[], T]:
    """No capture: the run is the function itself."""
    return run


def capture_graph(run: Callable[[], T]) -> Callable[[], T]:
    """`run` as a CUDA graph. It must read and write fixed memory and never wait for the device; what it returns is
    overwritten by the next replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> T:
        graph.replay()
        return result

    replay()  # the capture itself computes nothing
    return replay


def capture_for(device: torch.device) -> Capture:
    """How runs on `device` are made ready."""
    return capture_graph if device.type == "cuda" else call


class GraphForward(FewWidths):
    """`base` captured for each width and length of buffers when that is first met, one text at a time. Graphs are kept
    and serve later texts. Long chunks of a prompt and batches run as they are.

    Raises CannotServe where a capture fails, or gives other logits.
    """

    def __init__(self, base: Forward, device: torch.device, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__(base, widths)
        self._capture = capture_for(device)
        try_out(self, base, widths, device)

    def step(self, ids: Tensor, slots: StaticSlots) -> Tensor:
        """See FewWidths. The logits of a captured width are overwritten by the next step of that width."""
        store, width = slots.store, ids.shape[1]
        if width not in store.runs:
            store.runs[width] = _StepRun(self._base, slots, ids, self._capture)
        logits: Tensor = store.runs[width](ids)
        return logits

    def draft_loop(self, slots: StaticSlots, draw: Draw, steps: int, key: Hashable) -> "DraftLoop":
        """The loop of `steps` draft steps on `slots`. `key` names what `draw` does: loops are kept by it, and of many
        those that were used last."""
        loops = slots.store.loops
        loop: DraftLoop | None = loops.pop((steps, key), None)
        if loop is None:
            loop = DraftLoop(self._base, slots, draw, steps, self._capture)
        loops[steps, key] = loop
        if len(loops) > MOST_LOOPS:
            del loops[next(iter(loops))]
        return loop


class _StepRun:
    """One step of one width on fixed memory."""

    def __init__(self, base: Forward, slots: StaticSlots, ids: Tensor, capture: Capture) -> None:
        self._ids, self._store, self._base = ids.clone(), slots.store, base
        self._run = capture(self._logits)

    def __call__(self, ids: Tensor) -> Tensor:
        self._ids.copy_(ids)
        return self._run()

    def _logits(self) -> Tensor:
        slots = self._store.slots
        slots.forget_masks()
        return self._base(self._ids, slots, self._ids.shape[1])


class DraftLoop:
    """Drafts `steps` tokens after a last one, all in one run; nothing in between is read by the host."""

    def __init__(self, base: Forward, slots: StaticSlots, draw: Draw, steps: int, capture: Capture) -> None:
        self._base, self._store, self._draw, self._steps, self._capture = base, slots.store, draw, steps, capture
        self._token = self._position = self._uniforms = torch.empty(0)
        self._run: Callable[[], tuple[Tensor, list[Law]]] | None = None

    @torch.inference_mode()
    def __call__(self, token: Tensor, position: Tensor, uniforms: Tensor) -> tuple[Tensor, list[Law]]:
        """The drafted tokens [steps] and the law that each was drawn from, of one row.

        `token` [1] int64 is the last of the text, which the slots do not hold yet, `position` [1] int64 its place, and
        `uniforms` [steps] fp64 are in [0, 1); all on the device. The results are overwritten by the next call. The
        slots hold `token` and all drafted tokens but the last one afterwards. The buffers must have room for them.
        """
        if self._run is None:
            self._token, self._position, self._uniforms = token.clone(), position.clone(), uniforms.clone()
            self._run = self._made_ready()
        self._token.copy_(token)
        self._position.copy_(position)
        self._uniforms.copy_(uniforms)
        return self._run()

    def _made_ready(self) -> Callable[[], tuple[Tensor, list[Law]]]:
        try:
            return self._capture(self._drafted)
        except Exception as error:  # captures fail in many ways, in the middle of a text; uncaptured it draws the same
            reason = f"{type(error).__name__}: {first_line(error)}"
            log.warning("a draft of %d tokens runs step by step, as its capture fails: %s", self._steps, reason)
            return call(self._drafted)

    def _drafted(self) -> tuple[Tensor, list[Law]]:
        slots, token = self._store.slots, self._token
        tokens, laws = [], []
        for step in range(self._steps):
            slots.aim_at((self._position + step).unsqueeze(0))
            logits = self._base(token.unsqueeze(0), slots, 1)[0]
            token, law = self._draw(logits, self._uniforms[step : step + 1])
            tokens.append(token)
            laws.append(law)
        return torch.cat(tokens), laws
