"""Mask personal data: mail addresses, public IP addresses, and credentials."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_pipeline.cleaning.credentials import Span, credentials

EMAIL, IP_ADDRESS, SECRET = "EMAIL", "IP_ADDRESS", "SECRET"

MAIL = re.compile(
    r"(?<![\w.+%-])[\w+%-][\w.+%'-]{0,127}@((?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}([^\W\d_]{2,24}))(?![\w@-])"
)
# Domains of RFC 2606 and 6761, meant for documentation, and addresses of services, not of people.
EXAMPLE_DOMAIN = re.compile(
    r"(?:^|\.)(?:example(?:\.(?:com|org|net|edu))?|test|invalid|localhost|local)$", re.IGNORECASE
)
SERVICE_USERS = frozenset({"git", "hg", "svn"})  # git@host:path
# Words after an @ that are not domains: systemd unit instances, images at two sizes, package versions.
FILE_ENDINGS = frozenset(
    """
    service socket target timer mount automount slice scope device swap path conf png jpg jpeg gif svg webp js ts css
    txt html json yaml tgz gz jar deb rpm
    """.split()  # noqa: SIM905
)

IPV4 = re.compile(r"(?<![\w.-])(?<!\d:)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w-]|\.\w)")
IPV6 = re.compile(r"(?<![\w:.])[23][0-9a-fA-F]{3}:[0-9a-fA-F:]{2,34}(?![\w:])")
VERSION_BEFORE = re.compile(
    r"(?:(?<![A-Za-z])(?:versions?|release|ver|rev|revision|firmware|driver|build|upgrade[ds]?|since|v)"
    r"[\s:='\"(]{0,3}(?:to|from|is|of|number)?[\s:='\"(]{0,2}|[><=~!^]=\s?)$",
    re.IGNORECASE,
)
TITLE_AFTER = re.compile(r"\.?[ \t]{1,4}[A-Z][a-z]")
SECTION_NUMBER = 30  # section numbers of four levels stay below this
PUBLIC_SERVERS = {"8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9", "208.67.222.222", "208.67.220.220"}


class Masks(PipelineStep):
    """Step that masks mail and public IP addresses and credentials as `<EMAIL>`, `<IP_ADDRESS>` and `<SECRET>`.

    Within a document equal values get equal placeholders; the second value of a kind becomes `<EMAIL_2>`. Addresses
    meant for documentation stay (user@example.com, 192.0.2.1, 10.0.0.1, AKIAIOSFODNN7EXAMPLE), and so do placeholders
    and code in place of a password (`password=$PASSWORD`). The metadata "url" and "origin" are masked too. Masked
    values are counted by kind.
    """

    type = "MASKS"
    name = "masks"

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Yield the masked documents."""
        for document in data:
            with self.track_time():
                document.text, counts = mask(document.text)
                for name in ("url", "origin"):
                    if document.metadata.get(name):
                        document.metadata[name] = mask(str(document.metadata[name]))[0]
                for kind, count in counts.items():
                    self.stat_update(f"masked_{kind}", value=count)
                self.stat_update("masked_documents" if counts else "clean_documents")
            yield document


def mask(text: str) -> tuple[str, Counter[str]]:
    """Return the masked text, and the counts by kind: "email", "ip_address", or a kind of credential."""
    spans = _without_overlaps(text)
    if not spans:
        return text, Counter()
    counts: Counter[str] = Counter()
    names: dict[tuple[str, str], str] = {}
    numbers: Counter[str] = Counter()
    parts: list[str] = []
    done = 0
    for (start, end), kind, placeholder in spans:
        value = text[start:end]
        if (placeholder, value) not in names:
            numbers[placeholder] += 1
            number = numbers[placeholder]
            names[placeholder, value] = f"<{placeholder}>" if number == 1 else f"<{placeholder}_{number}>"
        parts += text[done:start], names[placeholder, value]
        done = end
        counts[kind] += 1
    parts.append(text[done:])
    return "".join(parts), counts


def _without_overlaps(text: str) -> list[tuple[Span, str, str]]:
    """Return ((start, end), kind, placeholder), in order. Overlapping credentials merge; others yield to them."""
    secrets: list[list] = []
    for (start, end), kind in sorted(credentials(text)):
        if secrets and start < secrets[-1][1]:
            secrets[-1][1] = max(secrets[-1][1], end)
        else:
            secrets.append([start, end, kind])
    found = [((start, end), kind, SECRET) for start, end, kind in secrets]
    others = [(span, "email", EMAIL) for span in _mail(text)] + [(span, "ip_address", IP_ADDRESS) for span in _ip(text)]
    if not others:
        return found
    merged: list[tuple[Span, str, str]] = []
    # At equal starts the credential comes first; what overlaps an earlier span or a later credential is dropped.
    ordered = sorted(found + others, key=lambda entry: (entry[0][0], entry[2] != SECRET))
    for entry in ordered:
        while merged and entry[2] == SECRET and merged[-1][0][1] > entry[0][0] and merged[-1][2] != SECRET:
            merged.pop()
        if not merged or merged[-1][0][1] <= entry[0][0]:
            merged.append(entry)
    return merged


def _mail(text: str) -> Iterator[Span]:
    if "@" not in text:
        return
    for match in MAIL.finditer(text):
        user = text[match.start() : match.start(1) - 1]
        ending = match[2].lower()
        if ending in FILE_ENDINGS or EXAMPLE_DOMAIN.search(match[1]) or user.lower() in SERVICE_USERS:
            continue
        yield match.span()


def _ip(text: str) -> Iterator[Span]:
    for match in IPV4.finditer(text):
        if _is_public(match[0]) and match[0] not in PUBLIC_SERVERS and not _is_version(text, match):
            yield match.span()
    if ":" in text:
        for match in IPV6.finditer(text):
            if _is_public(match[0].rstrip(":") if not match[0].endswith("::") else match[0]):
                yield match.span()


def _is_public(address: str) -> bool:
    """Return whether an address is public: not private, loopback, documentation, multicast or a network address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # 256.1.1.1, 01.2.3.4
        return False
    return parsed.is_global and not parsed.is_multicast and not address.endswith(".0.0")


def _is_version(text: str, match: re.Match) -> bool:
    """Return whether four numbers are a version or a section number: small, at the start of a line, before a title."""
    before = text[max(0, match.start() - 24) : match.start()]
    if VERSION_BEFORE.search(before):
        return True
    begins_line = not before.rpartition("\n")[2].strip(" \t#*=") and (match.start() < 24 or "\n" in before)
    numbers = map(int, match[0].split("."))
    return begins_line and max(numbers) < SECTION_NUMBER and bool(TITLE_AFTER.match(text, match.end()))
