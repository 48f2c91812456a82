"""What the block rule adds to the token rule: acceptance and speed of methods that differ in nothing else."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from decode.benchmark import MethodResult
from decode.timing import estimate
from distill.results.bench_names import MethodName
from distill.results.bench_run import Measured

Row = dict[str, Any]
Columns = tuple[list[int], list[float]]


def rule_rows(measured: Measured) -> list[Row]:
    """A row for each domain and each method that was run with both rules.

    Every figure is a ratio of sums over prompts, with its interval over prompts; a prompt's time is its least.
    """
    found = []
    for domain, prompts in measured.parts.items():
        for method, names in _with_both_rules(measured).items():
            by_rule = {rule: measured.result_of(name).only(prompts) for rule, name in names.items()}
            found.append(
                {
                    "domain": domain,
                    "method": method,
                    "num_prompts": len(prompts),
                    **{rule: {"method": names[rule], **_figures(result)} for rule, result in by_rule.items()},
                    "block_over_token": {
                        "mean_acceptance_length": _gain(by_rule, _tokens_and_passes),
                        "tokens_per_second": _gain(by_rule, _tokens_and_seconds),
                    },
                }
            )
    return found


def _with_both_rules(measured: Measured) -> dict[str, dict[str, str]]:
    """Method without its rule -> rule -> the method's name."""
    usual = "token" if measured.mismatches is not None else "block"  # of greedy and of sampled drafts
    found: dict[str, dict[str, str]] = {}
    for name in (entry.name for entry in measured.entries if entry.name.is_drafting):
        rule = usual if name.verifier in (None, "auto") else name.verifier
        found.setdefault(_without_rule(name), {}).setdefault(str(rule), name.text)
    return {
        method: {rule: names[rule] for rule in ("token", "block")} for method, names in found.items() if len(names) == 2
    }


def _without_rule(name: MethodName) -> str:
    return name.text.replace(f"/{name.verifier}", "") if name.verifier else name.text


def _figures(result: MethodResult) -> Row:
    return {
        "mean_acceptance_length": _plain(estimate(lambda a, b: a / b, *_tokens_and_passes(result))),
        "tokens_per_second": _plain(estimate(lambda a, b: a / b, *_tokens_and_seconds(result))),
    }


def _gain(by_rule: dict[str, MethodResult], columns: Callable[[MethodResult], Columns]) -> Row | None:
    """How many times as high a ratio is with the block rule, both rules on the same resampled prompts."""
    return _plain(
        estimate(lambda a, b, c, d: (a / b) / (c / d), *columns(by_rule["block"]), *columns(by_rule["token"]))
    )


def _tokens(result: MethodResult) -> list[int]:
    return [len(ids) for ids in result.outputs]


def _tokens_and_passes(result: MethodResult) -> Columns:
    return _tokens(result), [float(len(rounds)) for rounds in result.rounds]


def _tokens_and_seconds(result: MethodResult) -> Columns:
    return _tokens(result), [timing.best.seconds for timing in result.timings]


def _plain(found: Any) -> Row | None:
    return None if found is None else asdict(found)
