"""Requests to the Hub, and which are skipped when it cannot be reached."""

import socket
import urllib.request

import datasets
import pytest
from huggingface_hub import constants

from common.hub import use_cache_where_unreachable


@pytest.fixture
def looked_up(monkeypatch):
    """Return the looked-up names, on a machine that is offline but not configured so."""
    names = []

    def no_address(host, port):
        names.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return names


def offline() -> tuple[bool, bool]:
    return constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE


def test_where_the_hub_has_no_address_the_cache_is_all_there_is(looked_up, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example.org/mirror")
    use_cache_where_unreachable()
    use_cache_where_unreachable()
    assert offline() == (True, True)
    assert looked_up == ["hub.example.org"]


def test_a_hub_with_an_address_or_behind_a_proxy_is_asked(looked_up, monkeypatch):
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy:3128"})
    use_cache_where_unreachable()
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [host])
    use_cache_where_unreachable()
    assert offline() == (False, False)
    assert looked_up == []
