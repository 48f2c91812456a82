"""Knows whether the models hub can be reached, so that a mistyped path does not wait through a minute of retries."""

import os
import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS_TO_CONNECT = 1.5


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers a connection. Behind a proxy, which alone could tell, it is taken to."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if getproxies().keys() & {"https", "all"}:
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT", constants.ENDPOINT))
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=SECONDS_TO_CONNECT).close()
    except OSError:
        return False
    return True
