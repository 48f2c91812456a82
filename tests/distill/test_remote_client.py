"""What asks a server: waits between tries, proxies, names of models, and results of many requests in their order."""

import asyncio
import email.utils
import time
from collections.abc import Iterator

import pytest

from decode.errors import UsageError
from decode.models import LoadedModel
from distill.config import ServerConfig
from distill.remote import client
from distill.remote.client import Client
from distill.remote.target import find_served, run
from distill.remote.window import in_order
from tests.distill.openai_server import OpenAIServer, serving


@pytest.fixture
def server(loaded_target: LoadedModel) -> Iterator[OpenAIServer]:
    with serving(loaded_target) as server:
        yield server


def test_retry_after_is_honoured_in_seconds_and_as_a_date_and_waits_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = email.utils.formatdate(time.time() + 90, usegmt=True)
    assert 85 < client._asked_wait(soon) <= 90
    assert [client._asked_wait(v) for v in ("7", "-3", None, "later", "0.5")] == [7, 0, 0, 0, 0.5]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(client, "FIRST_WAIT", 0.5)
    asked = Client(ServerConfig("http://127.0.0.1:9/v1"))
    for tried in (1, 2, 3, 20):
        run(asked._wait(client.PassingFailure("busy"), tried))
    run(asked._wait(client.PassingFailure("busy", wait=30.0), 1))
    for seconds, longest in zip(slept, (0.5, 1, 2, 60, 30.5), strict=True):
        assert longest / 2 <= seconds <= longest
    assert slept[-1] >= 30


def test_a_model_that_is_not_served_is_refused_with_those_that_are(server: OpenAIServer) -> None:
    with pytest.raises(UsageError, match=r"server\.model: 'x' is not legal; expected one that \S+ serves: tiny"):
        find_served(ServerConfig(server.url, model="x"))
    assert find_served(ServerConfig(server.url)).model == "tiny"
    with pytest.raises(UsageError, match=r"/v1/v1 has no /models"):
        find_served(ServerConfig(server.url + "/v1"))


def test_proxies_of_the_environment_do_not_stand_before_this_machine(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, server.url.removesuffix("/v1"))  # asked as a proxy it knows no such path
    monkeypatch.delenv("no_proxy", raising=False)
    assert find_served(ServerConfig(server.url)).model == "tiny"
    assert find_served(ServerConfig(server.url.replace("127.0.0.1", "localhost"))).model == "tiny"
    with pytest.raises(UsageError, match=r"teacher\.invalid/v1 has no /models"):  # here they do stand
        find_served(ServerConfig("http://teacher.invalid/v1"))


def test_a_running_event_loop_is_refused() -> None:
    async def inside() -> None:
        find_served(ServerConfig("http://127.0.0.1:9/v1"))

    with pytest.raises(UsageError, match="running event loop"):
        asyncio.run(inside())


def test_results_come_in_order_and_a_failure_in_its_turn() -> None:
    begun, at_once, most = [], 0, 0

    async def job(number: int) -> int:
        nonlocal at_once, most
        begun.append(number)
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001 * (7 - number % 7))
        at_once -= 1
        if number == 40:
            raise ValueError("forty")
        return number

    async def collect() -> list[int]:
        found: list[int] = []
        with pytest.raises(ValueError, match="forty"):
            async for ready in in_order([lambda n=n: job(n) for n in range(100)], 3):
                found += ready
        return found

    assert asyncio.run(collect()) == list(range(40))
    assert most == 3 and max(begun) < 40 + 4 * 3  # no further ahead than its window
