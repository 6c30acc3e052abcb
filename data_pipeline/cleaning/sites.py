"""Rules on a document's origin: host and path of its url."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote, urlsplit

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from common.settings import SettingError


class Sites(BaseFilter):
    """Filter by the host and path of metadata "url"; documents without a url stay. Case is ignored.

    datatrove's URLFilter does not fit: it stops at a document without a url, looks up public suffixes on the network,
    and ignores paths.

    Args:
        allow_hosts: keep only these and their subdomains; None for all.
        deny_hosts: drop these and their subdomains, even if allowed.
        deny_paths: patterns with `*` and `?` for path and query, from the first `/` (`/tag/*`), or for host and path if
            they start with a host (`forum.example.org/users/*`, `*.example.org/*`).
        allow_paths: exceptions from `deny_paths`.
    """

    name = "sites"

    def __init__(
        self,
        allow_hosts: list[str] | None = None,
        deny_hosts: Sequence[str] = (),
        deny_paths: Sequence[str] = (),
        allow_paths: Sequence[str] = (),
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(exclusion_writer)
        self.allow_hosts = None if allow_hosts is None else _hosts("allow_hosts", allow_hosts)
        self.deny_hosts = _hosts("deny_hosts", deny_hosts)
        self.deny_paths = _patterns("deny_paths", deny_paths)
        self.allow_paths = _patterns("allow_paths", allow_paths)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document stays, or (False, the rule it breaks)."""
        url = doc.metadata.get("url")
        if not url:
            self.stat_update("no_url")
            return True
        try:
            parts = urlsplit(url if "://" in url else f"//{url}")
            host = (parts.hostname or "").rstrip(".")
        except ValueError:
            host = ""
        if not host:
            return False, "broken url"
        suffixes = _suffixes(host)
        if not self.deny_hosts.isdisjoint(suffixes):
            return False, "denied host"
        if self.allow_hosts is not None and self.allow_hosts.isdisjoint(suffixes):
            return False, "host not allowed"
        path = unquote(parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if _matches(self.deny_paths, host, path) and not _matches(self.allow_paths, host, path):
            return False, "denied path"
        return True


def _hosts(key: str, hosts: Iterable[str]) -> frozenset[str]:
    if isinstance(hosts, str):
        raise SettingError(f"corpus.cleaning.sites.{key}", hosts, f"give a list of hosts, like [{hosts}]")
    cleaned = frozenset(host.strip().lower().removeprefix("*.").rstrip(".") for host in hosts)
    for host in cleaned:
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)*|[0-9a-f:]+", host):
            fix = "give names such as docs.kernel.org"
            raise SettingError(f"corpus.cleaning.sites.{key}", host, fix, "is not a host")
    return cleaned


def _suffixes(host: str) -> list[str]:
    """Return a host and its parent domains: a.b.c, b.c, c."""
    labels = host.split(".")
    return [".".join(labels[start:]) for start in range(len(labels))]


def _patterns(key: str, patterns: Iterable[str]) -> tuple[re.Pattern | None, re.Pattern | None]:
    """Return expressions for paths, and for hosts with paths."""
    if isinstance(patterns, str):
        raise SettingError(f"corpus.cleaning.sites.{key}", patterns, f"give a list of patterns, like ['{patterns}']")
    paths = [pattern for pattern in patterns if pattern.startswith("/")]
    others = [pattern for pattern in patterns if not pattern.startswith("/")]
    for pattern in others:
        if "/" not in pattern or "://" in pattern:
            raise SettingError(f"corpus.cleaning.sites.{key}", pattern, "start it with / or a host and /, no scheme")
    return _joined(paths), _joined(others)


def _joined(patterns: list[str]) -> re.Pattern | None:
    return re.compile("|".join(map(fnmatch.translate, patterns)), re.IGNORECASE) if patterns else None


def _matches(patterns: tuple[re.Pattern | None, re.Pattern | None], host: str, path: str) -> bool:
    of_path, of_host = patterns
    return bool((of_path and of_path.match(path)) or (of_host and of_host.match(host + path)))
