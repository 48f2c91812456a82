"""Settings of a server that runs the target, and what can be asked of one."""

import re
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from decode.config import SamplingConfig
from decode.errors import UsageError, require, require_least

HIGHEST_BIAS = 100.0  # what the protocol takes; beyond it servers clamp
HIGHEST_PENALTY = 2.0
LOWEST_TEMPERATURE = 0.01  # vLLM raises what lies between 0 and this to it


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server, such as vLLM, that runs the target."""

    url: str | None = None
    """Base of its API, such as http://127.0.0.1:8000/v1; null: the target runs in this process."""
    model: str | None = None
    """The name that it serves the target by; null: the only one that it has."""
    api_key_env: str | None = None
    """Name of the environment variable that holds its key; null: it asks for none. The key itself is never written."""
    concurrency: int = 8
    """Requests under way at once."""
    timeout: float = 600.0
    """Seconds that one try of a request may take."""
    retries: int = 5
    """How often a request is sent again after a failure that may pass; the waits grow, and honour Retry-After."""

    def __post_init__(self) -> None:
        require_least(self, "server.", concurrency=1, retries=0)
        require(0 < self.timeout < float("inf"), "server.timeout", self.timeout, "a number of seconds > 0")
        if self.url is not None:
            _check_url(self.url)
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env, re.ASCII):
            raise UsageError("server.api_key_env: expected the name of an environment variable, not the key itself")
        for field in fields(self):
            value = getattr(self, field.name)
            if self.url is None and value != field.default:
                shown = "" if field.name == "api_key_env" else f"{value!r} "  # it might be a key by mistake
                raise UsageError(f"server.{field.name}: {shown}has no effect without server.url")


def _check_url(url: str) -> None:
    """Raises UsageError that shows the url only where no credentials can be in it."""
    try:
        parts = urlsplit(url)
        legal = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, say
        raise UsageError("server.url: it is no url; expected one such as http://127.0.0.1:8000/v1") from None
    if "@" in url or parts.query or parts.fragment:
        raise UsageError(
            "server.url: it holds credentials or a query; put the key in an environment variable and name that in "
            "server.api_key_env"
        )
    require(legal, "server.url", url, "the base of an API, such as http://127.0.0.1:8000/v1")


def check_can_be_asked(sampling: SamplingConfig) -> None:
    """Raise UsageError naming a sampling setting that a server can't be told, or that it would change."""
    default = SamplingConfig()
    for key in ("typical_p", "no_repeat_ngram_size", "bad_words_ids"):
        value = getattr(sampling, key)
        legal = f"{getattr(default, key)!r} with server.url: a server can't be told of it by token ids"
        require(value == getattr(default, key), f"sampling.{key}", value, legal)
    for key in ("frequency_penalty", "presence_penalty"):
        legal = f"a number from -{HIGHEST_PENALTY:g} to {HIGHEST_PENALTY:g} with server.url"
        require(abs(getattr(sampling, key)) <= HIGHEST_PENALTY, f"sampling.{key}", getattr(sampling, key), legal)
    for bias in sampling.logit_bias.values():
        legal = f"numbers from -{HIGHEST_BIAS:g} to {HIGHEST_BIAS:g} with server.url: servers clamp what is beyond"
        require(abs(bias) <= HIGHEST_BIAS, "sampling.logit_bias", bias, legal)
    if not sampling.greedy:
        legal = f"0, or at least {LOWEST_TEMPERATURE:g} with server.url: servers raise what is between"
        require(sampling.temperature >= LOWEST_TEMPERATURE, "sampling.temperature", sampling.temperature, legal)
        legal = "0 with server.url and a top_p below 1: servers apply min_p before top_p, which is another law"
        require(sampling.min_p == 0 or sampling.top_p == 1, "sampling.min_p", sampling.min_p, legal)
