"""A comparison that never ran: methods, rounds and seconds that are made up, so that every figure is known."""

from typing import Any

from decode.benchmark import Answer, MethodResult, Run, Timing
from decode.draft import Round
from decode.mismatch import Mismatch
from decode.stats import Stats
from decode.theory import Costs
from decode.timing import Phases
from distill.results.bench_methods import Entry
from distill.results.bench_names import parse_name
from distill.results.bench_run import Domain, Measured

# A plain step takes 10 ms, a round of 2 drafted tokens 2 * 1 + 13 + 0 = 15 ms.
COSTS = Costs(draft_ms=1.0, verify_ms=(10.0, 12.0, 13.0), round_ms=0.0)


def plain_answer(tokens: int) -> Answer:
    rounds = [Round(5 + i, [], 0, [1], 0.0, 0.010) for i in range(tokens)]
    return Answer([1] * tokens, None, rounds, Phases.of(rounds))


def drafted_answer(accepted: list[int]) -> Answer:
    """A round of two drafted tokens for each number of accepted ones; its passes take 2 and 13 ms."""
    rounds = [Round(5, [1, 1], kept, [1] * (kept + 1), 0.002, 0.013) for kept in accepted]
    return Answer([1] * sum(k + 1 for k in accepted), Stats.of(rounds), rounds, Phases.of(rounds))


def result(name: str, *answers: Answer, seconds: list[list[float]], first: float = 0.01) -> MethodResult:
    timings = [
        Timing([Run(answer, s, first) for s in of_prompt]) for answer, of_prompt in zip(answers, seconds, strict=True)
    ]
    return MethodResult(name, timings, warm_up_seconds=0.5)


def measured(
    *results: MethodResult, mismatches: dict[str, dict[int, Mismatch]] | None = None, **domains: int
) -> Measured:
    """The comparison of `results`; `domains` are names with their numbers of prompts of 5 tokens each."""
    entries = [entry(r.name) for r in results]
    shown = [Domain(name, [[1] * 5] * count) for name, count in (domains or {"a": 1, "b": 1}).items()]
    found = {r.name: {} for r in results} | (mismatches or {})
    return Measured(entries, list(results), shown, found)


def entry(text: str, backend: str = "eager") -> Entry:
    name, nothing = parse_name(text), None
    method: Any = nothing  # nothing is decoded
    if not name.is_ours:
        return Entry(name, method)
    return Entry(name, method, backend, backend if name.is_drafting else None, COSTS)


def usual(**changes: Any) -> Measured:
    """Two domains of one prompt, two repeats: plain decoding, transformers at half its speed, fixed:2 at 2.5 times."""
    return measured(
        result("plain", plain_answer(10), plain_answer(10), seconds=[[0.10, 0.14], [0.10, 0.12]]),
        result("transformers", Answer([1] * 10), Answer([1] * 10), seconds=[[0.2, 0.28], [0.2, 0.24]]),
        result(
            "fixed:2", drafted_answer([1, 2, 0, 2]), drafted_answer([2, 2, 1, 1]), seconds=[[0.06, 0.07], [0.06, 0.06]]
        ),
        **changes,
    )
