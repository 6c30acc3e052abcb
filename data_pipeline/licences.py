"""Licences as SPDX identifiers, from the URLs that pages link to and the licence texts in repositories."""

import re

_CREATIVE_COMMONS = re.compile(
    r"creativecommons\.org/(?:licenses/(by(?:-nc)?(?:-sa|-nd)?)/(\d\.\d)|publicdomain/(zero|mark)/1\.0)", re.IGNORECASE
)
_ADDRESSES = (
    (
        re.compile(r"gnu\.org/(?:licenses|copyleft)/fdl-1\.3|gnu\.org/(?:licenses|copyleft)/fdl\.html"),
        "GFDL-1.3-or-later",
    ),
    (re.compile(r"gnu\.org/licenses/(?:old-licenses/)?fdl-1\.2"), "GFDL-1.2-or-later"),
    (re.compile(r"apache\.org/licenses/LICENSE-2\.0"), "Apache-2.0"),
    (re.compile(r"opensource\.org/licenses?/MIT", re.IGNORECASE), "MIT"),
    (re.compile(r"opensource\.org/licenses?/BSD-3-Clause", re.IGNORECASE), "BSD-3-Clause"),
    (re.compile(r"opensource\.org/licenses?/BSD-2-Clause", re.IGNORECASE), "BSD-2-Clause"),
)
# Phrases near the head of each licence text, tried in this order: longer names before shorter ones.
_TEXTS = (
    (r"GNU LESSER GENERAL PUBLIC LICENSE Version 3", "LGPL-3.0-only"),
    (r"GNU LESSER GENERAL PUBLIC LICENSE Version 2\.1", "LGPL-2.1-only"),
    (r"GNU AFFERO GENERAL PUBLIC LICENSE Version 3", "AGPL-3.0-only"),
    (r"GNU GENERAL PUBLIC LICENSE Version 3", "GPL-3.0-only"),
    (r"GNU GENERAL PUBLIC LICENSE Version 2", "GPL-2.0-only"),
    (r"GNU Free Documentation License Version 1\.3", "GFDL-1.3-only"),
    (r"GNU Free Documentation License Version 1\.2", "GFDL-1.2-only"),
    (r"Apache License,? Version 2\.0", "Apache-2.0"),
    (r"Mozilla Public License,? Version 2\.0", "MPL-2.0"),
    (r"Eclipse Public License -? ?v ?2\.0", "EPL-2.0"),
    (r"CC0 1\.0 Universal", "CC0-1.0"),
    (r"This is free and unencumbered software released into the public domain", "Unlicense"),
    (r"Boost Software License -? ?Version 1\.0", "BSL-1.0"),
    (
        r"Permission to use, copy, modify, and(?:/or)? distribute this software for any purpose with or without fee",
        "ISC",
    ),
    (r"Permission is hereby granted, free of charge, to any person obtaining a copy", "MIT"),
    (r"Redistribution and use in source and binary forms.{0,2500}?Neither the name", "BSD-3-Clause"),
    (r"Redistribution and use in source and binary forms", "BSD-2-Clause"),
)
_TEXT_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), name) for pattern, name in _TEXTS)
_CREATIVE_COMMONS_TEXT = re.compile(
    r"(?:Creative Commons )?(Attribution(?:[- ]NonCommercial)?(?:[- ](?:ShareAlike|NoDerivatives|NoDerivs))?)"
    r" (\d\.\d) (?:International|Unported|Generic)",
    re.IGNORECASE,
)
HEAD_CHARACTERS = 4000
_WORDS = {"attribution": "BY", "noncommercial": "NC", "sharealike": "SA", "noderivatives": "ND", "noderivs": "ND"}


def licence_of_address(address: str) -> str | None:
    """Return the SPDX identifier of the licence at a URL, or None if it is unknown."""
    match = _CREATIVE_COMMONS.search(address)
    if match:
        kind, version, public = match.groups()
        if public:
            return "CC0-1.0" if public.lower() == "zero" else None  # the mark is a statement, not a licence
        return f"CC-{kind.upper()}-{version}"
    return next((name for pattern, name in _ADDRESSES if pattern.search(address)), None)


def licence_of_text(text: str) -> str | None:
    """Return the SPDX identifier of the licence whose text starts in the first HEAD_CHARACTERS, or None.

    The first licence in the text counts: a later paragraph about other files (logos, code samples) does not.
    """
    head = " ".join(text[:HEAD_CHARACTERS].split())
    found = [(match.start(), name) for pattern, name in _TEXT_PATTERNS if (match := pattern.search(head))]
    match = _CREATIVE_COMMONS_TEXT.search(head)
    if match:
        words = re.split(r"[- ]", match[1].lower())
        found.append((match.start(), f"CC-{'-'.join(_WORDS[word] for word in words)}-{match[2]}"))
    # Compare positions only; min keeps the first of equal positions, the longer name.
    return min(found, key=lambda place: place[0])[1] if found else None
