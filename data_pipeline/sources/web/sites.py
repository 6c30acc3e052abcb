"""Allow-list of web sites, each with a category."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


class Sites:
    """Wanted URLs: `categories` maps a category to sites, each a host or a host/path.

    A host includes its subdomains: `kernel.org` matches docs.kernel.org, but not mykernel.org. A path includes
    everything below it: `a.org/docs` matches a.org/docs/x, but not a.org/docs-old. If several sites match, the longest
    host wins, then the longest path. Schemes, ports and queries are ignored.

    Raises:
        ValueError: a site is invalid, or in two categories; the line names `source.sites`.
    """

    def __init__(self, categories: Mapping[str, Sequence[str]]) -> None:
        self._rules: dict[str, list[tuple[str, str]]] = {}  # host -> (path, category), longer paths first
        for category, sites in categories.items():
            if isinstance(sites, str):
                raise ValueError(f"source.sites.{category}={sites}: give a list of sites")
            for site in sites:
                self._add(str(site), category)
        if not self._rules:
            raise ValueError("source.sites is empty: give at least one site, as in {design: [lwn.net]}")
        for rules in self._rules.values():
            rules.sort(key=lambda rule: -len(rule[0]))

    def category(self, url: str) -> str | None:
        """Return the category of a URL, or None if no site matches."""
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").rstrip(".")
        except ValueError:
            return None
        path = parts.path.rstrip("/") + "/"
        while host:
            for prefix, category in self._rules.get(host, ()):
                if path.startswith(prefix):
                    return category
            host = host.partition(".")[2]
        return None

    def _add(self, site: str, category: str) -> None:
        host, slash, path = site.partition("/")
        if not host or any(mark in site for mark in (":", "*", "?", "#", " ")) or host.startswith("."):
            raise ValueError(
                f"source.sites.{category}: {site!r} is no site: give a host or host/path, without https://, port and *"
            )
        prefix = f"/{path.strip('/')}/" if slash and path.strip("/") else "/"
        rules = self._rules.setdefault(host.lower(), [])
        other = next((other for known, other in rules if known == prefix), None)
        if other is not None and other != category:
            raise ValueError(f"source.sites: {site!r} is in {other} and in {category}: leave it in one")
        if other is None:
            rules.append((prefix, category))
