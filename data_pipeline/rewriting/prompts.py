"""Prompts: templates with named fields, filled in to chat messages."""

import string
from collections.abc import Mapping, Sequence

from common.settings import NO_VALUE, SettingError


def check_template(key: str, template: str, names: Sequence[str], needed: str | None = None) -> None:
    """Check that a template has only known fields, and the one that it needs.

    Raises:
        SettingError: it does not.
    """
    parsed = string.Template(template)
    if not parsed.is_valid():
        raise SettingError(key, NO_VALUE, "write $$ for a dollar sign", "has a $ that starts no name")
    for name in parsed.get_identifiers():
        if name not in names:
            raise SettingError(key, NO_VALUE, f"give one of ${', $'.join(names)}", f"has the field ${name}")
    if needed is not None and needed not in parsed.get_identifiers():
        raise SettingError(key, NO_VALUE, "put it where the document goes", f"lacks the field ${needed}")


def chat_messages(system: str, user: str, values: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the messages with the fields filled in; templates within a field are not expanded, empty ones left out."""
    filled = {
        role: string.Template(template).substitute(values).strip()
        for role, template in (("system", system), ("user", user))
    }
    return [{"role": role, "content": content} for role, content in filled.items() if content]
