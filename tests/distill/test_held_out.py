"""Acceptance on held-out answers, against definition by loops; and the study's table over seeds."""

import json
from pathlib import Path

import pytest
import torch

from decode.config import ModelConfig
from decode.models import load_model
from distill.drafts.load import load_draft
from distill.results.held_out import acceptance_on
from distill.results.study import read_cells, table_lines

CPU = ModelConfig(device="cpu", dtype="float64")


def test_every_acceptance_is_what_its_definition_gives_row_by_row(fit_pair: Path) -> None:
    target = load_model(str(fit_pair / "target"), CPU, role="target")
    draft = load_draft(fit_pair / "draft", target, CPU)
    rows = [json.loads(line) for line in (fit_pair / "rows.jsonl").read_text().splitlines()]
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        p = target.model(input_ids=ids).logits[0].double().softmax(-1)
        q = torch.zeros_like(p)
        assert draft.vocab_ids is not None
        q[:, draft.vocab_ids] = draft.model(input_ids=ids).logits[0].double().softmax(-1)
        for place in range(len(row["mask"]) - 1):
            if row["mask"][place + 1]:
                choice = int(q[place].argmax())
                sums[0] += torch.minimum(p[place], q[place]).sum()
                sums[1] += p[place, choice]
                sums[2] += float(choice == int(p[place].argmax()))
                count += 1
    (found,) = acceptance_on(str(fit_pair / "rows.jsonl"), target, [draft])
    names = ("expected_acceptance", "greedy_acceptance", "greedy_agreement")
    assert [found[f"val/{name}"] for name in names] == pytest.approx((sums / count).tolist(), abs=1e-9)
    assert found["val/expected_acceptance_upper"] == found["val/expected_acceptance"]


def test_a_model_is_always_accepted_by_itself(fit_pair: Path) -> None:
    target = load_model(str(fit_pair / "target"), CPU, role="target")
    (found,) = acceptance_on(str(fit_pair / "rows.jsonl"), target, [target])
    assert found["val/expected_acceptance"] == pytest.approx(1, abs=1e-12)
    assert found["val/greedy_agreement"] == 1


def test_the_table_marks_what_no_seed_of_the_baseline_reaches(tmp_path: Path) -> None:
    values = {
        "kl-0": 0.40,
        "kl-1": 0.42,
        "better-0": 0.43,
        "better-1": 0.44,
        "mixed-0": 0.41,
        "mixed-1": 0.50,
        "one-0": 0.9,
    }
    rows = [{"path": f"runs/{run}/checkpoints/last.ckpt", "expected_acceptance": v} for run, v in values.items()]
    (tmp_path / "metrics.json").write_text(json.dumps({"drafts": rows}))
    columns = {"expected": "expected_acceptance", "length": "mean_acceptance_length"}
    lines = table_lines(read_cells(str(tmp_path), columns), columns, "kl")
    assert lines[0] == "| variant | seeds | expected | length |"
    shown = {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}
    assert "0.410 (0.400-0.420) |" in shown["kl"]
    assert "0.435 (0.430-0.440) * |" in shown["better"]
    assert "*" not in shown["mixed"] and "*" not in shown["one"]  # one seed has no spread to be beyond
