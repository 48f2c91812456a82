"""The completions protocol by exact token ids, as vLLM extends it: what is asked, and what an answer must hold.

Pure: no network, no files. The ids that a server gives are believed only where they fit all that was asked.
"""

from collections.abc import Collection, Sequence
from typing import Any

from decode.config import SamplingConfig
from decode.errors import DraftsmithError
from decode.stopping import Stopping


def completion_request(
    model: str,
    ids: Sequence[int],
    sampling: SamplingConfig,
    max_new_tokens: int,
    eos_ids: Collection[int],
    seed: int,
) -> dict[str, Any]:
    """The body of one request. Every setting is sent: a server fills what is left out from the model's own defaults.

    The target's ids end a text, and no others, whatever the server takes from the files that it serves.
    """
    return {
        "model": model,
        "prompt": list(ids),
        "add_special_tokens": False,
        "return_token_ids": True,
        "max_tokens": max_new_tokens,
        "n": 1,
        "seed": seed,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,
        **({"logit_bias": sampling.logit_bias} if sampling.logit_bias else {}),
        **({"allowed_token_ids": sampling.allowed_ids} if sampling.allowed_ids else {}),
    }


def generated_ids(reply: dict[str, Any], request: dict[str, Any], vocab_size: int) -> list[int]:
    """The ids that the target produced, up to and including the one that ends the text.

    Raises DraftsmithError where the reply gives no ids, was made for another prompt, or can't be what was asked for.
    Text is never tokenised again instead: other ids than the target's own may spell it.
    """
    choice = _only_choice(reply)
    ids = choice.get("token_ids")
    if ids is None:
        raise DraftsmithError(
            "server: its answers hold no token_ids, so which tokens the target produced can't be known; expected a "
            "server that honours return_token_ids, as vLLM does"
        )
    _check_prompt(choice, request)
    if not _are_ids(ids, vocab_size) or not ids:
        raise DraftsmithError(f"server: token_ids of an answer are not ids below {vocab_size}; expected the target's")
    stopping = Stopping(request["max_tokens"], request["stop_token_ids"])
    if stopping.cut(ids) != ids or stopping.reason is None:
        raise DraftsmithError(
            f"server: an answer of {len(ids)} tokens ends with id {ids[-1]} ({choice.get('finish_reason')}); expected "
            f"{request['max_tokens']} tokens, or fewer up to one of the target's end-of-text ids "
            f"{request['stop_token_ids']}"
        )
    return list(ids)


def scoring_request(model: str, ids: Sequence[int], top_k: int) -> dict[str, Any]:
    """The body that asks for the target's law at each position of `ids`; the one new token is not looked at."""
    return {
        "model": model,
        "prompt": list(ids),
        "add_special_tokens": False,
        "return_token_ids": True,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top_k,
    }


def top_log_probs(reply: dict[str, Any], request: dict[str, Any], vocab_size: int) -> list[dict[int, float]]:
    """For each id of the prompt but the first: the likeliest ids there with their log-probs, likeliest first.

    Raises DraftsmithError where the reply is about other ids, or gives fewer than were asked for.
    """
    choice, top_k = _only_choice(reply), min(request["prompt_logprobs"], vocab_size)
    _check_prompt(choice, request)
    given = choice.get("prompt_logprobs")
    prompt = request["prompt"]
    if not isinstance(given, list) or len(given) != len(prompt):
        raise DraftsmithError("server: it gives no prompt_logprobs of each position; expected a server such as vLLM")
    laws = []
    for place in range(1, len(prompt)):
        law = _law(given[place], vocab_size)
        if prompt[place] not in law or len(law) < top_k:
            raise DraftsmithError(
                f"server: prompt_logprobs at position {place} hold {len(law)} ids; expected the {top_k} likeliest and "
                f"the prompt's own, {prompt[place]}"
            )
        laws.append(dict(list(law.items())[:top_k]))
    return laws


def _only_choice(reply: dict[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise DraftsmithError("server: an answer has not one choice; expected the completions protocol")
    return choices[0]


def _check_prompt(choice: dict[str, Any], request: dict[str, Any]) -> None:
    """A server that adds a token of its own, a BOS say, would answer another prompt."""
    given = choice.get("prompt_token_ids")
    if given != request["prompt"]:
        told = f"a prompt of {len(given)} other ids" if isinstance(given, list) else "no prompt_token_ids"
        raise DraftsmithError(
            f"server: its answer to a prompt of {len(request['prompt'])} ids tells of {told}; expected the same ids"
        )


def _are_ids(ids: Any, vocab_size: int) -> bool:
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)


def _law(entries: Any, vocab_size: int) -> dict[int, float]:
    """Id to log-prob, likeliest first; a server adds the prompt's own id where that is none of the likeliest."""
    try:
        found = [(-float(e["logprob"]), e.get("rank") or 0, int(token)) for token, e in entries.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    if not all(0 <= token < vocab_size and lost >= -1e-6 for lost, _, token in found):
        return {}
    return {token: min(0.0, -lost) for lost, _, token in sorted(found)}
