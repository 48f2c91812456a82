"""Figures of each method in each domain: JSON-safe rows, in which what is undefined is None."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from decode.benchmark import MethodResult, Timing
from decode.draft import Round
from decode.mismatch import Mismatch
from decode.stats import Stats
from decode.theory import predict_run
from decode.timing import paired_ratio, spread_of
from distill.results.bench_methods import Entry
from distill.results.bench_names import TRANSFORMERS, parse_name
from distill.results.bench_run import Measured

Row = dict[str, Any]


def rows_of(measured: Measured) -> list[Row]:
    """A row for each domain and method, and, where there are several domains, for all prompts together."""
    rows = []
    for domain, prompts in measured.parts.items():
        plain = measured.plain.only(prompts)
        theirs = next((r.only(prompts) for r in measured.results if r.name == TRANSFORMERS), None)
        for entry, result in zip(measured.entries, measured.results, strict=True):
            part = result.only(prompts)
            rows.append(
                {
                    "domain": domain,
                    "method": result.name,
                    "target_backend": entry.target_backend,
                    "draft_backend": entry.draft_backend,
                    "num_prompts": len(prompts),
                    **speeds(part),
                    **_over("plain", part, plain),
                    **_over("transformers", part, theirs),
                    **(part.stats or Stats()).as_dict(),
                    "phases": phases_of(part),
                    "prediction": prediction_of(entry, part, plain),
                    "mismatches": _mismatches(measured, result.name, prompts),
                }
            )
    return rows


def best_fixed(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each domain the fixed length with the most tokens per second, and each policy's speed in units of it."""
    found = []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        speed = {row["method"]: row["tokens_per_second"] for row in rows if row["domain"] == domain}
        fixed = [name for name in speed if parse_name(name).kind == "fixed"]
        policies = [name for name in speed if parse_name(name).is_drafting and name not in fixed]
        best = max(fixed, key=lambda name: speed[name], default=None)
        if best is not None and speed[best] > 0:
            shares = {name: speed[name] / speed[best] for name in policies}
            found.append({"domain": domain, "method": best, "policies": shares})
    return found


def speeds(result: MethodResult) -> Row:
    """Tokens over seconds, reading the prompt included and apart. The least time of each prompt counts."""
    first = [run.first_seconds for t in result.timings for run in t.runs if run.first_seconds is not None]
    tokens, seconds = _after_first(result.timings)
    return {
        "total_tokens": result.total_tokens,
        "total_seconds": result.total_seconds,
        "tokens_per_second": result.tokens_per_second,
        "first_token_ms": 1000 * median(first) if first else None,
        "decode_tokens_per_second": tokens / seconds if seconds > 0 else None,
        "spread": spread_of([t.paces for t in result.timings]),
    }


def _after_first(timings: Iterable[Timing]) -> tuple[int, float]:
    """Tokens after each text's first, and the seconds that they took beyond a call for one token."""
    tokens, seconds = 0, 0.0
    for timing in timings:
        first = [run.first_seconds for run in timing.runs if run.first_seconds is not None]
        if first and len(timing.answer.ids) > 1:
            tokens += len(timing.answer.ids) - 1
            seconds += timing.best.seconds - min(first)
    return tokens, seconds


def _over(name: str, result: MethodResult, other: MethodResult | None) -> Row:
    """Speed over another method's: of all tokens and seconds, and the median of paired measurements."""
    pairs = None
    if other is not None:
        both = [_pairs(a, b) for a, b in zip(result.timings, other.timings, strict=True)]
        pairs = paired_ratio([[a for a, _ in of_prompt] for of_prompt in both], [[b for _, b in p] for p in both])
    return {
        f"speedup_over_{name}": None if other is None else result.speedup_over(other),
        f"paired_speedup_over_{name}": None if pairs is None else asdict(pairs),
    }


def _pairs(ours: Timing, theirs: Timing) -> list[tuple[float, float]]:
    """Seconds per token of both methods in each repeat in which both made any."""
    return [
        (a.seconds / len(a.answer.ids), b.seconds / len(b.answer.ids))
        for a, b in zip(ours.runs, theirs.runs, strict=True)
        if a.answer.ids and b.answer.ids
    ]


def phases_of(result: MethodResult) -> Row | None:
    """Milliseconds of a round; the passes of the first round, which reads the prompt, apart. None where untold.

    Draft: its passes, for ours with the drawing of its tokens. Target: its pass. Host: all else, the call's own
    preparations included. For transformers without a draft a round is a token.
    """
    found = [(t.answer.phases, t.best.seconds) for t in result.timings if t.answer.phases is not None]
    rounds = sum(phases.rounds for phases, _ in found)
    if not rounds:
        return None
    inside = sum(p.first_seconds + p.draft_seconds + p.target_seconds for p, _ in found)
    return {
        "rounds": rounds,
        "prompt_ms": 1000 * median(phases.first_seconds for phases, _ in found),
        "draft_ms": 1000 * sum(phases.draft_seconds for phases, _ in found) / rounds,
        "target_ms": 1000 * sum(phases.target_seconds for phases, _ in found) / rounds,
        "host_ms": 1000 * (sum(seconds for _, seconds in found) - inside) / (rounds + len(found)),
    }


def prediction_of(entry: Entry, result: MethodResult, plain: MethodResult) -> Row | None:
    """What the measured costs promise for the rounds that were decoded, beside what they took.

    The first round, which reads the prompt, is left out of both. None for others' methods.
    """
    rounds = [done for of_prompt in result.rounds for done in of_prompt[1:]]
    measured, own_plain = steady_speed(result), steady_speed(plain)
    if entry.costs is None or not rounds or measured is None or own_plain is None:
        return None
    found = predict_run(entry.costs, [len(r.drafted) for r in rounds], sum(len(r.emitted) for r in rounds))
    return {
        "tokens_per_second": found.tokens_per_second,
        "measured_tokens_per_second": measured,
        "speedup": found.tokens_per_second / own_plain,
        "measured_speedup": measured / own_plain,
        "measured_share": measured / found.tokens_per_second,
    }


def steady_speed(result: MethodResult) -> float | None:
    """Tokens per second once the prompt is read; None where rounds or their times are not known.

    All rounds but each text's first; where passes cannot be timed one by one, all but a call for one token.
    """
    tokens, seconds = 0, 0.0
    for timing in result.timings:
        answer, first = timing.answer, [r.first_seconds for r in timing.runs if r.first_seconds is not None]
        if not answer.rounds[1:] or (answer.phases is None and not first):
            continue
        if answer.phases is None:
            tokens += len(answer.ids) - 1
            seconds += timing.best.seconds - min(first)
        else:
            tokens += sum(len(done.emitted) for done in answer.rounds[1:])
            seconds += timing.best.seconds - answer.phases.first_seconds
    return tokens / seconds if seconds > 0 else None


def _mismatches(measured: Measured, method: str, prompts: Sequence[int]) -> Row | None:
    if measured.mismatches is None:
        return None
    found = [m for at, m in measured.mismatches[method].items() if at in prompts]
    kinds = [mismatch.kind for mismatch in found]
    return {"ties": kinds.count("tie"), "differences": kinds.count("difference")}


def mismatch_rows(measured: Measured) -> list[Row]:
    """Every text that differs: where, which tokens, by what gap; prompts are numbered over all domains."""
    found = measured.mismatches or {}
    return [_mismatch_row(method, at, m) for method, of_method in found.items() for at, m in of_method.items()]


def _mismatch_row(method: str, at: int, mismatch: Mismatch) -> Row:
    return {"method": method, "prompt": at, "kind": mismatch.kind, **asdict(mismatch)}


def timing_rows(measured: Measured) -> list[Row]:
    """A row for each method, prompt and repeat; prompts are numbered over all domains."""
    lengths = [(domain.name, len(ids)) for domain in measured.domains for ids in domain.prompts]
    return [
        {
            "method": result.name,
            "domain": lengths[at][0],
            "prompt": at,
            "prompt_tokens": lengths[at][1],
            "repeat": repeat,
            "tokens": len(run.answer.ids),
            "seconds": run.seconds,
            "first_token_seconds": run.first_seconds,
        }
        for result in measured.results
        for at, timing in enumerate(result.timings)
        for repeat, run in enumerate(timing.runs)
    ]


def all_rounds(result: MethodResult) -> list[Round]:
    """The rounds of all prompts' best runs."""
    return [done for of_prompt in result.rounds for done in of_prompt]
