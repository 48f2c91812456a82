"""What is known of a target that runs elsewhere: its tokenizer and settings, and the name a server has for it."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from decode.config import ModelConfig
from decode.errors import DraftsmithError, UsageError, require
from decode.hub import hub_is_reachable
from decode.models import LoadedModel, load_config, load_tokenizer, resolve_model_path
from distill.config.server import ServerConfig
from distill.remote.client import Client

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Weightless:
    """A transformers model without its weights: what settings alone tell."""

    config: Any
    generation_config: Any


@dataclass(frozen=True)
class Served:
    """A model as a server has it."""

    url: str
    model: str
    max_length: int | None
    """The longest prompt and answer together, in tokens; None where the server does not tell."""
    version: str | None
    """The server program's own version; None where it does not tell."""


def describe_target(name: str, config: ModelConfig) -> LoadedModel:
    """Tokenizer and settings of `name`; no weights are loaded. Raises UsageError as load_model does."""
    from transformers import GenerationConfig

    path = resolve_model_path(name)
    settings = load_config(path, config, role="target")
    generation = GenerationConfig.from_model_config(settings)
    with suppress(OSError):  # many models have none of their own
        local_only = not Path(path).is_dir() and not hub_is_reachable()
        generation = GenerationConfig.from_pretrained(path, local_files_only=local_only)
    return LoadedModel(Weightless(settings, generation), load_tokenizer(path, config, role="target"), name)


def find_served(config: ServerConfig) -> Served:
    """Ask the server what it has. Raises UsageError, with the names that it has, for a model that is not there."""
    return run(_find_served(config))


async def _find_served(config: ServerConfig) -> Served:
    async with Client(config, patient=False) as client:
        listed = (await client.get(f"{client.url}/models")).get("data")
        models = {str(m["id"]): m for m in listed if "id" in m} if isinstance(listed, list) else {}
        if not models:
            raise UsageError(f"server.url: {client.url} serves no model")
        name = config.model or next(iter(models))
        legal = f"one that {client.url} serves: {', '.join(sorted(models))}"
        require(
            config.model in models or (config.model is None and len(models) == 1), "server.model", config.model, legal
        )
        length = models[name].get("max_model_len")
        version = None
        with suppress(DraftsmithError):  # beside the API, and vLLM's own
            version = (await client.get(f"{client.url.removesuffix('/v1')}/version", retries=0)).get("version")
    return Served(
        client.url, name, length if isinstance(length, int) else None, version if isinstance(version, str) else None
    )


def run(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Do `work` to its end. Ctrl-C ends it at once, with all requests that are under way.

    Raises UsageError inside a running event loop, such as a notebook's.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise UsageError("server.url: it can't be used inside a running event loop, such as a notebook's; use the command")
