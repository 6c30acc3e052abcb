"""The Hugging Face Hub where it cannot be reached: its clients would try for half a minute, for each file."""

import socket
import sys
import urllib.request
from urllib.parse import urlsplit

from huggingface_hub import constants


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
