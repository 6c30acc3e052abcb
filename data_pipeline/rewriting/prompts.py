"""Prompts: templates with named fields, filled in to chat messages."""

import string
from collections.abc import Mapping, Sequence


def check_template(key: str, template: str, names: Sequence[str], needed: str | None = None) -> None:
    """Check that a template has only known fields, and the one that it needs.

    Raises:
        ValueError: it does not; the line names the key.
    """
    parsed = string.Template(template)
    if not parsed.is_valid():
        raise ValueError(f"{key} has a $ that begins no name: write $$ for a dollar sign")
    for name in parsed.get_identifiers():
        if name not in names:
            raise ValueError(f"{key} has the field ${name}: give one of ${', $'.join(names)}")
    if needed is not None and needed not in parsed.get_identifiers():
        raise ValueError(f"{key} lacks the field ${needed}: put it where the document goes")


def chat_messages(system: str, user: str, values: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the messages with the fields filled in; templates within a field are not expanded, empty ones left out."""
    filled = {
        role: string.Template(template).substitute(values).strip()
        for role, template in (("system", system), ("user", user))
    }
    return [{"role": role, "content": content} for role, content in filled.items() if content]
