#!/usr/bin/env python
"""Compare a server's answers and scores with those of the target itself; exit status 1 where they are not the same."""

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from decode.errors import DraftsmithError, first_line

PROMPTS = (
    "Name three rivers in Europe.",
    "Write a short story for children about a brave fox and a lantern.",
    "Write a Python function that reverses a list.",
    "Why is the sky blue?",
)
NEAR_TIE = 1e-3  # logits nearer than this may change places between two ways to sum
TOLERANCE = 1e-3  # of log-probs, in nats; both sides are fp32


def main(url: str, output: Path, target: str = "smollm2-135m", server_process: int | None = None) -> None:
    """Answer four prompts greedily and sampled, and score two of the answers, there and here.

    Args:
        url: Base of the server's API.
        output: Folder for what generate writes; replaced.
        server_process: Process id of the server, so that its end is not waited for in vain.
    """
    from decode.config import ModelConfig, SamplingConfig
    from decode.models import load_model
    from distill.config import GenerateConfig, ServerConfig
    from distill.generate import generate
    from distill.runs import versions

    server = ServerConfig(url, concurrency=4)
    served = wait_for(server, server_process)
    print(f"{time.strftime('%Y-%m-%d')}: server version {served.version}, model {served.model}")
    print({key: value for key, value in versions().items() if key in ("python", "torch", "transformers", "threads")})
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    prompts = output / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    greedy = GenerateConfig(target, str(prompts), str(output / "greedy.jsonl"), 96, SamplingConfig(), server=server)
    sampled = replace(greedy, output=str(output / "sampled.jsonl"), sampling=SamplingConfig(1.0, top_p=0.95))
    for config in (greedy, sampled):
        report = generate(config)
        print(f"{config.output}: {report.num_written} rows, {report.num_tokens} tokens in {report.seconds:.1f} s")
    repeats = repeated(sampled)
    loaded = load_model(target, ModelConfig(device="cpu"), role="target")
    same = [same_greedily(loaded, row) for row in rows_of(greedy.output)]
    near = scores_agree(loaded, server, greedy.output)
    passed = all(same) and near and repeats
    print("passed" if passed else "FAILED")
    if not passed:
        raise SystemExit(1)


def wait_for(server: Any, process: int | None) -> Any:
    """What the server serves, as soon as it does; at most five minutes."""
    from distill.remote.target import find_served

    for _ in range(300):
        try:
            return find_served(server)
        except DraftsmithError as error:
            said = first_line(error)
        if process is not None:
            os.kill(process, 0)
        time.sleep(1)
    raise DraftsmithError(said)


def rows_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(output).read_text().splitlines()]


def repeated(config: Any) -> bool:
    """Cut the output in its second row and run again: seeds are of rows, so the same bytes should come."""
    from distill.generate import generate

    whole = Path(config.output).read_bytes()
    os.truncate(config.output, len(whole.splitlines(keepends=True)[0]) + 20)
    generate(config)
    same = Path(config.output).read_bytes() == whole
    print(f"sampled, cut in the second row and continued: {'the same bytes' if same else 'OTHER bytes'}")
    return same


def same_greedily(loaded: Any, row: dict[str, Any]) -> bool:
    """Whether each answered id is the target's likeliest, given those before it; ties that are near count as such."""
    import torch

    ids, start = row["input_ids"], row["mask"].index(1)
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
    answered = torch.tensor(ids[start:])
    behind = logits.max(-1).values - logits.gather(-1, answered[:, None])[:, 0]
    ties = int(((behind > 0) & (behind <= NEAR_TIE)).sum())
    wrong = int((behind > NEAR_TIE).sum())
    print(f"greedy row {row['row']}: {len(answered)} ids, {wrong} not the target's likeliest, {ties} near ties")
    return wrong == 0


def scores_agree(loaded: Any, server: Any, output: str) -> bool:
    from distill.data.examples import Example
    from distill.remote.scores import RemoteScorer
    from distill.teacher.scoring import TargetScorer

    rows = rows_of(output)[:2]
    examples = [Example(row["input_ids"], [bool(bit) for bit in row["mask"]], "row") for row in rows]
    there = RemoteScorer(server, 32, 1.0, loaded.vocab_size).score_batch([0, 1], examples)
    here = TargetScorer(loaded.model, 32).score_batch([0, 1], examples)
    equal = there["ids"] == here["ids"]
    off = float((there["log_probs"] - here["log_probs"]).abs().max())
    tails = float((there["log_tail"].exp() - here["log_tail"].exp()).abs().max())
    print(
        f"scores of {len(there['ids'])} positions, top 32: {float(equal.float().mean()):.2%} of places hold equal ids"
    )
    print(f"largest difference: log-prob of a place {off:.1e} nats, mass of a tail {tails:.1e}")
    return off < TOLERANCE and tails < TOLERANCE


if __name__ == "__main__":
    try:
        auto_cli(main)
    except DraftsmithError as error:
        print(f"vllm_teacher_check: {first_line(error)}", file=sys.stderr)
        sys.exit(error.exit_status)
