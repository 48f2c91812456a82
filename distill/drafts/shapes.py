"""Sizes of a draft: which width, depth and heads a wanted parameter count or cost ratio stands for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from decode.errors import UsageError, require
from distill.config import InitConfig

S = TypeVar("S")

DEFAULT_HIDDEN_SIZE = 256
DEFAULT_NUM_LAYERS = 4
WIDTHS = (64, 96, *range(128, 1024, 64), *range(1024, 4097, 128))
# Timing noise makes a draft look dear now and then, so the search goes on past a first miss, but not past a second.
MISSES_BEFORE_STOP = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-type body."""

    hidden_size: int
    num_layers: int

    def __post_init__(self) -> None:
        require(self.hidden_size % 8 == 0, "hidden_size", self.hidden_size, "a multiple of 8")

    @property
    def head_dim(self) -> int:
        """64 where at least two heads of it fill the width, else the largest of 32, 16 and 8 that divides it."""
        sizes = (64, 32, 16, 8) if self.hidden_size >= 128 else (32, 16, 8)
        return next(size for size in sizes if self.hidden_size % size == 0)

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Half, a third or a quarter of the heads, whichever divides them first; else all of them."""
        return next((self.num_heads // n for n in (2, 3, 4) if self.num_heads % n == 0), self.num_heads)

    @property
    def intermediate_size(self) -> int:
        """8/3 of the width, so that the gated layer costs what a plain one of 4 times the width does; rounded to 32."""
        return max(32, round(self.hidden_size * 8 / 3 / 32) * 32)

    @property
    def num_parameters(self) -> int:
        """Parameters of the layers and the last norm; embeddings and head apart."""
        d = self.hidden_size
        attention = 2 * d * d + 2 * d * self.num_kv_heads * self.head_dim
        return self.num_layers * (attention + 3 * d * self.intermediate_size + 2 * d) + d

    def describe(self) -> str:
        return f"{self.hidden_size} wide, {self.num_layers} layers, {self.num_parameters / 1e6:.2f}M parameters in them"


@dataclass(frozen=True)
class Depth:
    """How many of the target's layers a draft is made of."""

    num_layers: int

    def describe(self) -> str:
        return f"{self.num_layers} layers of the target"


def default_depth(hidden_size: int) -> int:
    """Drafts are shallow for their width: a step's latency grows with depth, and acceptance little.

    4 layers at 256, 6 at 512, 10 at 1024.
    """
    return 2 + round(hidden_size / 128)


def fixed_shape(config: InitConfig) -> Shape:
    """The shape that needs no measuring: from num_parameters, or from hidden_size and num_layers, or the default."""
    if config.num_parameters is not None:
        return closest_shape(config.num_parameters, config.num_layers)
    hidden = config.hidden_size or DEFAULT_HIDDEN_SIZE
    return Shape(hidden, config.num_layers or (default_depth(hidden) if config.hidden_size else DEFAULT_NUM_LAYERS))


def candidate_shapes(num_layers: int | None) -> list[Shape]:
    """Shapes from small to large, at the given depth or at the default one of each width."""
    return [Shape(width, num_layers or default_depth(width)) for width in WIDTHS]


def closest_shape(num_parameters: int, num_layers: int | None) -> Shape:
    """The shape whose layers come closest to `num_parameters`, its depth at most one off the default for its width.

    Raises UsageError when none is within a factor of 2.
    """
    shapes = candidate_shapes(num_layers)
    if num_layers is None:
        shapes += [replace(s, num_layers=s.num_layers + extra) for s in shapes for extra in (-1, 1)]
    best = min(shapes, key=lambda s: abs(s.num_parameters - num_parameters))
    if not 0.5 <= best.num_parameters / num_parameters <= 2:
        sizes = [s.num_parameters for s in shapes]
        depth = f" with num_layers {num_layers}" if num_layers else ""
        raise UsageError(
            f"num_parameters: {num_parameters} is out of reach{depth}; expected about {min(sizes)} to {max(sizes)}"
        )
    return best


def largest_within(shapes: Iterable[S], budget: float, cost: Callable[[S], float]) -> tuple[S, float]:
    """The largest of `shapes` (small to large) that costs at most `budget`, and its cost.

    `cost` is measured, so it is asked for as few shapes as the search needs. Raises UsageError naming the smallest
    shape's cost when even that is over the budget.
    """
    best: tuple[S, float] | None = None
    smallest, misses = float("inf"), 0
    for shape in shapes:
        price = cost(shape)
        smallest = min(smallest, price)
        if price <= budget:
            best, misses = (shape, price), 0
        else:
            misses += 1
        if misses == MISSES_BEFORE_STOP:
            break
    if best is None:
        raise UsageError(
            f"fit_cost_ratio: {budget} is below the {smallest:.3f} measured for the smallest draft; "
            f"expected at least that, or a smaller draft_vocab_size"
        )
    return best
