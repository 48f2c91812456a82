"""What the loop reads of a round, and when rows leave it."""

import pytest
import torch

from decode.draft import Draft, Verdict
from decode.errors import DraftsmithError
from decode.laws import Law
from decode.loop import _read_each, _read_together, decode_rounds
from decode.proposers import PROPOSERS, Setup
from decode.verifiers import VERIFIERS
from tests.fixtures import P, Q
from tests.tables import TableSession, table_row


@pytest.mark.parametrize("bad", [None, 0, 1, 2, 3])
def test_one_read_tells_what_many_reads_tell(bad: int | None) -> None:
    flags = [torch.tensor(True), None, True, torch.tensor(True)]
    if bad is not None:
        flags[bad] = torch.tensor(False)
    drafts = [Draft(torch.tensor([4, 5]), None, flags[1]), Draft(torch.empty(0, dtype=torch.int64), None, flags[3])]
    verdicts = [Verdict(torch.tensor(1), torch.tensor(9)), Verdict(torch.tensor(0), torch.tensor(7))]
    laws = [Law.point(torch.tensor([1]), flags[0]), Law.point(torch.tensor([1]), flags[2])]
    decisions, healthy = _read_each(drafts, verdicts, laws)
    assert (decisions, healthy) == _read_together(drafts, verdicts, laws)
    assert decisions == [([4, 5], 1, 9), ([], 0, 7)]
    assert [not fine for fine in healthy] == [index == bad for index in range(4)]


def test_rows_stop_apart_and_leave_the_sessions() -> None:
    left: list[list[int]] = []

    class Session(TableSession):
        def keep_rows(self, rows: list[int]) -> None:
            left.append(list(rows))

    generator = torch.Generator().manual_seed(0)
    rows = [table_row(budget, 2, generator) for budget in (0, 1, 9, 4)]
    steps = list(
        decode_rounds(
            rows, Session([P] * 6), PROPOSERS["draft_model"](Setup(TableSession([Q] * 6), 6)), VERIFIERS["token"]
        )
    )
    assert [row.length - 1 for row in rows] == [0, 1, 9, 4]
    assert left[0] == [1, 2, 3] and left[1][0] == 1, "the row without a budget is never run, that of one token leaves"
    assert {index for index, _ in steps[-1]} == {2}


def test_a_law_that_settings_left_empty_is_told_apart_from_bad_weights() -> None:
    nothing = [(0.0,) * 6] * 6
    row = table_row(3, 0, torch.Generator())
    with pytest.raises(DraftsmithError, match=r"^target: .* its weights or dtype are at fault$"):
        list(decode_rounds([row], TableSession(nothing), PROPOSERS["none"](Setup(None, 6)), VERIFIERS["token"]))
