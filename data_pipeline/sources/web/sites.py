"""An allow-list of web sites, each with the category of what is written there."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


class Sites:
    """Which addresses are wanted: `categories` maps a category to sites, each a host or a host/path.

    A host stands for itself and every host under it: `kernel.org` is also docs.kernel.org, and not mykernel.org. A path
    stands for itself and what lies under it: `a.org/docs` is also a.org/docs/x, and not a.org/docs-old. Where several
    sites match, the longest host decides, then the longest path. Schemes, ports and queries do not matter.
    Raises ValueError naming `source.sites` for one that is no site, or is in two categories.
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
        """Return the category of an address, or None where no site has it."""
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
