"""The order of a run: every example once an epoch, full windows, the same in every run."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.data.schedule import Schedule, pack, rows_of_rank

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=40)
SIZES = {"batch_size": st.integers(1, 6), "accumulate": st.integers(1, 5), "seed": st.integers(0, 2**63 - 1)}


def seen(windows: list[list[list[list[int]]]]) -> list[int]:
    """Example indices in the order in which they come."""
    return [index for window in windows for batch in window for members in batch for index in members]


@given(lengths=LENGTHS)
@settings(deadline=None)
def test_packs_hold_every_example_once_and_keep_the_limit(lengths: list[int]) -> None:
    packs = pack(lengths, 20)
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in members) for members in packs]
    assert all(0 < size <= 20 for size in sizes)
    assert sum(sorted(sizes)[:2]) > 20 or len(packs) == 1  # else two packs would have been one


@given(lengths=LENGTHS, epochs=st.integers(1, 4), packing=st.booleans(), **SIZES)
@settings(deadline=None)
def test_every_example_comes_once_an_epoch_and_only_the_last_window_is_short(
    lengths: list[int], epochs: int, packing: bool, batch_size: int, accumulate: int, seed: int
) -> None:
    run = Schedule(lengths, 20, batch_size, accumulate, seed, max_epochs=epochs, packing=packing)
    windows = [run.window(number) for number in range(run.num_windows)]
    order = seen(windows)
    for epoch in range(epochs):
        part = order[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(part) == list(range(len(lengths)))
    assert len(order) == epochs * len(lengths)
    for window in windows[:-1]:
        assert [len(batch) for batch in window] == [batch_size] * accumulate
    assert 1 <= len(windows[-1]) <= accumulate and all(windows[-1])
    assert run.num_tokens(run.num_windows) == epochs * sum(lengths)
    assert run.num_tokens(1) == sum(lengths[index] for index in seen(windows[:1]))


@given(lengths=LENGTHS, steps=st.integers(1, 30), **SIZES)
@settings(deadline=None)
def test_a16_t16_a_run_of_n_steps_has_n_full_windows_that_cross_epochs(
    lengths: list[int], steps: int, batch_size: int, accumulate: int, seed: int
) -> None:
    run = Schedule(lengths, 20, batch_size, accumulate, seed, max_steps=steps)
    windows = [run.window(number) for number in range(steps)]
    assert run.num_windows == steps
    assert all([len(batch) for batch in window] == [batch_size] * accumulate for window in windows)
    counts = Counter(seen(windows))
    assert max(counts.values()) - min(counts[index] for index in range(len(lengths))) <= 1
    with pytest.raises(IndexError):
        run.window(steps)


@given(lengths=LENGTHS, world=st.integers(1, 5), **SIZES)
@settings(deadline=None)
def test_ranks_share_the_rows_of_each_micro_batch_without_overlap(
    lengths: list[int], world: int, batch_size: int, accumulate: int, seed: int
) -> None:
    run = Schedule(lengths, 20, batch_size, accumulate, seed, max_epochs=1)
    for batch in (batch for number in range(run.num_windows) for batch in run.window(number)):
        parts = [rows_of_rank(batch, rank, world) for rank in range(world)]
        assert sorted(members for part in parts for members in part) == sorted(batch)


def test_a16_fewer_examples_than_a_batch_make_a_short_window_not_none() -> None:
    run = Schedule([4, 4, 4], 4, batch_size=8, max_epochs=1)
    assert run.num_windows == 1 and len(run.window(0)) == 1 and sorted(seen([run.window(0)])) == [0, 1, 2]


def test_t16_windows_longer_than_an_epoch_go_on_into_the_next() -> None:
    run = Schedule([4] * 10, 4, batch_size=1, accumulate=16, max_epochs=2)  # 10 micro-batches an epoch
    assert [len(run.window(number)) for number in range(run.num_windows)] == [16, 4]


def test_windows_can_be_asked_for_in_any_order_and_again() -> None:
    run = Schedule([3] * 30, 6, batch_size=2, max_steps=60, seed=5)
    forwards = [run.window(number) for number in range(60)]
    again = Schedule([3] * 30, 6, batch_size=2, max_steps=60, seed=5)
    assert [again.window(number) for number in reversed(range(60))] == forwards[::-1]
    other = Schedule([3] * 30, 6, batch_size=2, max_steps=60, seed=6)
    assert [other.window(number) for number in range(60)] != forwards


def test_epochs_are_shuffled_anew() -> None:
    run = Schedule([1] * 50, 1, batch_size=50, max_epochs=2, packing=False)
    assert seen([run.window(0)]) != seen([run.window(1)]) != list(range(50))


def test_padding_is_what_rows_of_one_width_leave_empty() -> None:
    assert Schedule([4, 4, 4, 4], 8, batch_size=2, max_steps=1).padding_share == 0
    alone = Schedule([2, 4], 8, batch_size=2, max_steps=1, packing=False)
    assert alone.padding_share == 2 / 8
    assert Schedule([2, 4], 8, batch_size=1, max_steps=1, packing=False).padding_share == 0
