"""Names on the Hugging Face Hub, and where it cannot be reached: its clients would try half a minute for each file."""

import socket
import sys
import urllib.request
from urllib.parse import urlsplit

from huggingface_hub import constants


def is_path(name: str) -> bool:
    """Whether `name` can only be a path: on the Hub names are `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def use_cache_where_unreachable() -> None:
    """Have the clients look in their cache alone, for the rest of this process, where the Hub's name has no address.

    To be called before something is asked of the Hub. Behind a proxy nothing changes: the name is the proxy's to look
    up.
    """
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        config = sys.modules.get("datasets.config")  # has a copy of its own once it is imported
        if config is not None:
            config.HF_HUB_OFFLINE = True
