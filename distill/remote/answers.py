"""A server answers encoded prompts, many at once; answers come in the prompts' order, and none of them is lost."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from decode.config import SamplingConfig
from distill.config.server import ServerConfig
from distill.remote.client import Client
from distill.remote.early import EarlyAnswers, request_key
from distill.remote.protocol import completion_request, generated_ids
from distill.remote.target import run
from distill.remote.window import in_order


@dataclass(frozen=True)
class Asked:
    """How prompts are answered: everything but the prompts themselves."""

    server: ServerConfig
    model: str
    """The name that the server has for the target."""
    sampling: SamplingConfig
    max_new_tokens: int
    eos_ids: Collection[int]
    vocab_size: int


def answer_all(
    asked: Asked,
    prompts: Sequence[tuple[list[int], int]],  # ids, and the seed of their draw
    early: EarlyAnswers,
    write: Callable[[list[list[int]]], None],
) -> None:
    """Answer `prompts`; `write` gets the generated ids of each, in order, some at a time, as soon as it may.

    Raises as Client and generated_ids do, once all that comes before the failed prompt is written; what was answered
    behind it is in `early`.
    """
    run(_answer_all(asked, prompts, early, write))


async def _answer_all(
    asked: Asked,
    prompts: Sequence[tuple[list[int], int]],
    early: EarlyAnswers,
    write: Callable[[list[list[int]]], None],
) -> None:
    async with Client(asked.server) as client:
        jobs: list[Callable[[], Awaitable[tuple[str, list[int]]]]] = [
            partial(_answer, client, asked, early, *prompt) for prompt in prompts
        ]
        async with aclosing(in_order(jobs, asked.server.concurrency)) as results:
            async for ready in results:
                write([ids for _, ids in ready])
                early.forget([key for key, _ in ready])


async def _answer(
    client: Client, asked: Asked, early: EarlyAnswers, prompt: list[int], seed: int
) -> tuple[str, list[int]]:
    """What was asked, by its key, and the answer: what an earlier run kept of it, or a new one."""
    request = completion_request(asked.model, prompt, asked.sampling, asked.max_new_tokens, asked.eos_ids, seed)
    key = request_key(client.url, request)
    ids = early.get(key)
    if ids is None:
        ids = generated_ids(await client.post("/completions", request), request, asked.vocab_size)
        early.keep(key, ids)
    return key, ids
