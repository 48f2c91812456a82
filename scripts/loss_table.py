#!/usr/bin/env python
"""Print the study's table: each variant's acceptance and speed on every domain, mean and spread over its seeds."""

from jsonargparse import auto_cli

COLUMNS = {
    "expected": "expected_acceptance",
    "greedy": "greedy_acceptance",
    "agreement": "greedy_agreement",
    "length": "mean_acceptance_length",
    "x plain": "speedup_over_plain",
    "x transformers": "speedup_over_transformers",
}


def main(reports: list[str], baseline: str = "forward_kl") -> None:
    """Print a Markdown table for each report of `draftsmith eval` over runs named VARIANT-SEED.

    Args:
        baseline: The variant that the others are compared with: a difference is marked where the least of the one is
            above the most of the other.
    """
    from distill.results.study import read_cells, table_lines

    for report in reports:
        print(f"\n{report}\n")
        print("\n".join(table_lines(read_cells(report, COLUMNS), COLUMNS, baseline)))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
