"""Speaks HTTP with a server: one request, sent again while that may help. Knows nothing of what is asked."""

import asyncio
import email.utils
import ipaddress
import json
import logging
import os
import random
import time
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx2

from decode.errors import DraftsmithError, UsageError, first_line
from distill.config.server import ServerConfig

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a request is sent again, doubled from try to try
LONGEST_WORDS = 300  # characters of a server's own words that are passed on
PASSING = {408, 425, 429}  # and all from 500 up

logger = logging.getLogger(__name__)


class PassingFailure(Exception):
    """What may go well when it's tried again."""

    def __init__(self, reason: str, wait: float = 0.0, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.unreachable = wait, unreachable


class Client:
    """A server's API at `config.url`; use it as an async context manager.

    Raises UsageError for what the settings are to blame for, DraftsmithError for what the server is; both in one line
    that never shows the key.
    """

    def __init__(self, config: ServerConfig, *, patient: bool = True) -> None:
        """`patient`: wait for a server that can't be reached, which has likely been; else its url is likely wrong."""
        assert config.url is not None
        self.url, self._config = config.url.rstrip("/"), config
        self._key = _read_key(config)
        self._patient = patient
        self._told: set[str] = set()
        self._jitter = random.Random()
        self._http = _open(self.url, self._key, config.concurrency)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def get(self, url: str, *, retries: int | None = None) -> dict[str, Any]:
        return await self._ask("GET", url, None, self._config.retries if retries is None else retries)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("POST", self.url + path, body, self._config.retries)

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None, retries: int) -> dict[str, Any]:
        for tried in range(1, retries + 2):
            try:
                answer = await self._once(method, url, body)
            except PassingFailure as failure:
                if tried > retries or (failure.unreachable and not self._patient):
                    raise DraftsmithError(self._final(failure, tried)) from None
                await self._wait(failure, tried)
            else:
                self._told.clear()
                return answer
        raise AssertionError("the last try returns or raises")

    def _final(self, failure: PassingFailure, tried: int) -> str:
        times = f" ({tried} tries)" if tried > 1 else ""
        return f"server {self.url}: {failure}{times}"

    async def _wait(self, failure: PassingFailure, tried: int) -> None:
        """Sleep for a time that doubles and is drawn from its upper half, so that many requests don't come as one."""
        if failure.wait > self._config.timeout:
            raise DraftsmithError(
                f"server {self.url}: {failure}; it asks to wait {failure.wait:.0f} s, longer than server.timeout, "
                f"{self._config.timeout:g}; run the same command then"
            )
        doubled = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tried - 1))
        seconds = failure.wait + doubled * self._jitter.uniform(0.5, 1.0)
        if str(failure) not in self._told:
            self._told.add(str(failure))
            logger.warning("server %s: %s; asked again in %.1f s", self.url, failure, seconds)
        await asyncio.sleep(seconds)

    async def _once(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._config.timeout):
                response = await self._http.request(method, url, json=body)
        except TimeoutError:
            raise PassingFailure(f"no answer within {self._config.timeout:g} s (server.timeout)") from None
        except httpx2.ConnectError as error:
            reason = f"it can't be reached: {first_line(error)}"
            raise PassingFailure(reason, unreachable=True) from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise PassingFailure(f"the connection broke: {first_line(error)}") from None
        if response.status_code in PASSING or response.status_code >= 500:
            raise PassingFailure(self._words(response), _asked_wait(response.headers.get("retry-after")))
        if response.status_code != 200:
            raise self._refusal(response, url)
        with suppress(ValueError):
            answer = json.loads(response.content)
            if isinstance(answer, dict):
                return answer
        raise PassingFailure("its answer is no JSON object")

    def _refusal(self, response: httpx2.Response, url: str) -> UsageError:
        status, words = response.status_code, self._words(response)
        if status in (401, 403):
            name = self._config.api_key_env
            asked = f"it refuses the key in {name}" if name else "it asks for a key; set its variable's name"
            return UsageError(f"server.api_key_env: server {self.url}: {asked}: {words}")
        if status in (301, 302, 303, 307, 308):
            return UsageError(f"server.url: {self.url} sends elsewhere ({status}); expected the API's own address")
        if status == 404:
            path = url.removeprefix(self.url)
            return UsageError(f"server.url: {self.url} has no {path}, or not for this model: {words}")
        return UsageError(f"server {self.url}: it refuses the request: {words}")

    def _words(self, response: httpx2.Response) -> str:
        """Status and the server's own message, in one line, without the key."""
        said = response.text
        with suppress(ValueError, AttributeError):
            found = json.loads(said)
            error = found.get("error", found)
            said = str(error if isinstance(error, str) else error.get("message") or error.get("detail") or error)
        if self._key:
            said = said.replace(self._key, "***")
        said = " ".join(said.split())[:LONGEST_WORDS]
        return f"{response.status_code} {response.reason_phrase}".strip() + (f": {said}" if said else "")


def _read_key(config: ServerConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise UsageError("server.api_key_env: the environment variable that it names is not set")
    if not key.isascii() or not key.isprintable():
        raise UsageError("server.api_key_env: what the variable holds can't be sent; expected printable ASCII")
    return key


def _open(url: str, key: str | None, concurrency: int) -> httpx2.AsyncClient:
    """Proxies of the environment hold for all but this machine's own servers, which no proxy can reach."""
    try:
        return httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=None,  # a try as a whole has one
            limits=httpx2.Limits(max_connections=concurrency),
            trust_env=not _is_this_machine(urlsplit(url).hostname or ""),
        )
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"server.url: the proxy that the environment sets can't be used: {first_line(error)}"
        ) from None


def _is_this_machine(host: str) -> bool:
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost" or host.endswith(".localhost")


def _asked_wait(value: str | None) -> float:
    """Seconds of a Retry-After header, which gives them or a date; 0 where it gives neither."""
    with suppress(TypeError, ValueError):
        return max(0.0, float(value or ""))
    with suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(value or "").timestamp() - time.time())
    return 0.0
