"""Sizes of drafts."""

import pytest

from decode.errors import UsageError
from distill.config import InitConfig
from distill.drafts.shapes import Shape, candidate_shapes, closest_shape, fixed_shape, largest_within


def test_a_cost_ratio_out_of_reach_names_the_smallest_cost() -> None:
    with pytest.raises(UsageError, match=r"fit_cost_ratio: 0.1 is below the 0.300 measured"):
        largest_within(candidate_shapes(1), 0.1, lambda shape: 0.3)


@pytest.mark.parametrize("wanted", [300_000, 3_000_000, 30_000_000, 300_000_000])
def test_num_parameters_is_met_within_a_quarter(wanted: int) -> None:
    assert closest_shape(wanted, None).num_parameters == pytest.approx(wanted, rel=0.25)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="num_parameters: 10 is out of reach; expected about"):
        closest_shape(10, None)
    with pytest.raises(UsageError, match=r"hidden_size: 100 .*a multiple of 8"):
        fixed_shape(InitConfig(target="t", output="o", hidden_size=100))


def test_shapes_are_legal() -> None:
    assert fixed_shape(InitConfig(target="t", output="o")) == Shape(256, 4)
    for shape in [*candidate_shapes(None), *(Shape(8 * n, 1) for n in range(1, 65))]:
        assert shape.num_heads * shape.head_dim == shape.hidden_size
        assert shape.num_heads % shape.num_kv_heads == 0
