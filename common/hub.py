"""Hugging Face Hub names, and offline use: without a network its clients retry half a minute per file."""

import socket
import sys
import urllib.request
from urllib.parse import urlsplit

from huggingface_hub import constants


def is_path(name: str) -> bool:
    """Return whether `name` can only be a path: Hub names are `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def use_cache_where_unreachable() -> None:
    """Set the clients offline for the rest of this process if the Hub's host name does not resolve.

    Call it before the first request to the Hub. Behind a proxy nothing changes, because the proxy resolves the name.
    """
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        config = sys.modules.get("datasets.config")  # copies the value at import
        if config is not None:
            vars(config)["HF_HUB_OFFLINE"] = True
