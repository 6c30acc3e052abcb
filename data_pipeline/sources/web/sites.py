"""Allow-list of web sites, each with a category."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from common.settings import NO_VALUE, SettingError


class Sites:
    """Wanted URLs: `categories` maps a category to sites, each a host or a host/path.

    A host includes its subdomains: `kernel.org` matches docs.kernel.org, but not mykernel.org. A path includes
    everything below it: `a.org/docs` matches a.org/docs/x, but not a.org/docs-old. If several sites match, the longest
    host wins, then the longest path. Schemes, ports and queries are ignored.

    Raises:
        ValueError: a site is invalid, or in two categories; the error names `sites`.
    """

    def __init__(self, categories: Mapping[str, Sequence[str]]) -> None:
        self._rules: dict[str, list[tuple[str, str]]] = {}  # host -> (path, category), longer paths first
        for category, sites in categories.items():
            if isinstance(sites, str):
                raise SettingError("sites", {category: sites}, "give a list of sites for each category")
            for site in sites:
                self._add(str(site), category)
        if not self._rules:
            raise SettingError("sites", NO_VALUE, "give at least one site, as in {design: [lwn.net]}", "is empty")
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
            fix = "give a host or host/path, without https://, port and *"
            raise SettingError("sites", {category: site}, fix, "is not a site")
        prefix = f"/{path.strip('/')}/" if slash and path.strip("/") else "/"
        rules = self._rules.setdefault(host.lower(), [])
        other = next((other for known, other in rules if known == prefix), None)
        if other is not None and other != category:
            raise SettingError("sites", {category: site}, "leave it in one", f"is in {other} too")
        if other is None:
            rules.append((prefix, category))
