"""Find credentials in text: private keys, tokens of known form, passwords in URLs, settings and headers.

Every expression runs in time linear in the text: each repetition is bounded, or its next character decides its end, and
no match can start within another one's run.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

Span = tuple[int, int]

KEY_MARK = re.compile(r"-{4,5} ?(BEGIN|END) ([A-Z0-9]{1,12}[ ]){0,4}PRIVATE KEY( BLOCK)? ?-{4,5}")
KEY_BODY = re.compile(r"[A-Za-z0-9+/=]{16}")  # "..." or "your key here" as a key needs no mask
KEY_CHARACTERS = 65_536  # the longest private key with its headers
# Text after a BEGIN without END: lines of base64, quoted or with \n in them as in JSON and Python strings.
KEY_REST = re.compile(r"(?:[A-Za-z0-9+/=:,>#|*\"' \t\r\n-]|\\[nrt\\])*")
PUTTY_KEY = re.compile(r"PuTTY-User-Key-File-\d:[^\n]{0,80}\n(?:[^\n]{0,200}\n){0,80}?Private-MAC: ?[0-9a-f]{8,128}")

BREAK = r"(?:\\?\r?\n[ \t>#]{0,16})"  # a long token may be wrapped
WRAPPED_WORD = rf"[\w-]{{8,}}+(?:{BREAK}[\w-]{{16,}}+){{0,32}}+"
# name: (literals of which every match contains one, expression). If the expression has a group, only that is masked.
TOKENS: dict[str, tuple[str, str]] = {
    "aws_key_id": ("AKIA ASIA ABIA ACCA", r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}(?![A-Za-z0-9])"),
    "google_api_key": ("AIza", r"(?<![\w-])AIza[\w-]{35}(?![\w-])"),
    "google_oauth": ("GOCSPX-", r"GOCSPX-[\w-]{20,40}"),
    "google_access_token": ("ya29.", r"ya29\.[\w.-]{20,2048}"),
    "azure_client_secret": ("Q~", r"(?<![\w~.-])[\w~.-]{3}\dQ~[\w~.-]{31,34}(?![\w~.-])"),
    "azure_signature": ("sig=", r"[?&;]sig=([\w%+/-]{20,120}(?:%3[dD]|=){0,2})"),
    "github_token": ("ghp_ gho_ ghu_ ghs_ ghr_", r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{30,255}"),
    "github_fine_grained_token": ("github_pat_", r"github_pat_\w{22,255}"),
    "gitlab_token": (
        "glpat- gldt- glrt- glcbt- glptt- glft- glimt- glagent- glsoat- glffct-",
        r"(?<![A-Za-z0-9])gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct)-[\w.-]{20,300}",
    ),
    "slack_token": ("xox", r"(?<![A-Za-z0-9])xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,250}"),
    "slack_app_token": ("xapp-", r"xapp-\d-[A-Za-z0-9-]{20,250}"),
    "slack_webhook": ("hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows|triggers)/([\w/+-]{20,120})"),
    "discord_webhook": ("/api/webhooks/", r"/api/webhooks/\d{15,20}/([\w-]{50,90})"),
    "openai_key": ("sk-", r"(?<![A-Za-z0-9])sk-(?=[A-Za-z_-]{0,64}+\d)[A-Za-z0-9_-]{20,300}"),
    "hugging_face_token": ("hf_ api_org_", r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{30,60}"),
    "npm_token": ("npm_", r"(?<![A-Za-z0-9])npm_[A-Za-z0-9]{36}"),
    "pypi_token": ("pypi-", r"(?<![A-Za-z0-9])pypi-[\w-]{50,2048}"),
    "stripe_key": ("_live_ _test_ whsec_", r"(?<![A-Za-z0-9])(?:(?:sk|rk)_(?:live|test)|whsec)_[A-Za-z0-9]{16,250}"),
    "twilio_key": ("SK", r"(?<![A-Za-z0-9])SK[0-9a-f]{32}(?![A-Za-z0-9])"),
    "sendgrid_key": ("SG.", r"(?<![A-Za-z0-9])SG\.[\w-]{16,32}\.[\w-]{16,64}"),
    "telegram_token": (":AA", r"(?<!\d)\d{8,10}:AA[\w-]{33}(?![\w-])"),
    "digitalocean_token": ("dop_v1_ doo_v1_ dor_v1_", r"(?<![A-Za-z0-9])do[opr]_v1_[0-9a-f]{64}"),
    "docker_token": ("dckr_", r"dckr_(?:pat|oat)_[\w-]{20,64}"),
    "databricks_token": ("dapi", r"(?<![A-Za-z0-9])dapi[0-9a-f]{32}(?:-\d)?(?![A-Za-z0-9])"),
    "vault_token": ("hvs. hvb. hvr.", r"(?<![A-Za-z0-9])hv[sbr]\.[\w-]{24,300}"),
    "shopify_token": ("shpat_ shpca_ shppa_ shpss_", r"(?<![A-Za-z0-9])shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    "grafana_token": ("glsa_ glc_", r"(?<![A-Za-z0-9])gl(?:sa|c)_[\w+/=]{32,400}"),
    "tailscale_key": ("tskey-", r"tskey-[a-z]{3,10}-[A-Za-z0-9-]{20,80}"),
    "terraform_token": (".atlasv1.", r"(?<![A-Za-z0-9])[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,80}"),
    "age_key": ("AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    "json_web_token": (
        "eyJ",
        rf"(?<![\w-])eyJ{WRAPPED_WORD}{BREAK}?\.{BREAK}?eyJ{WRAPPED_WORD}(?:{BREAK}?\.{BREAK}?{WRAPPED_WORD})?",
    ),
    "azure_storage_key": ("==", r"(?<!sha512-)(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==(?![A-Za-z0-9+/=])"),
    # The secret follows its id, in a file or a table, with or without a name.
    "aws_secret_key": (
        "AKIA ASIA",
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Za-z0-9])[^\0]{1,80}?"
        r"(?<![A-Za-z0-9/+])([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
    ),
    "password_hash": ("$", r"\$(?:[156y]|2[abxy]?|7|gy|sha1|argon2(?:id?|d))\$[./A-Za-z0-9$,=+]{20,300}"),
}
COMPILED = [(literals.split(), re.compile(expression)) for literals, expression in TOKENS.values()]

USER_INFO = re.compile(r"://(?:[^\s/:@'\"<>]{0,256}:([^\s/'\"<>]{1,256})|([^\s/:@'\"<>]{16,256}))@")
AUTHORIZATION = re.compile(
    r"authorization[\"'\\]{0,2}[ \t]{0,4}[:=,][ \t]{0,4}[\"'\\]{0,2}(?:[a-z]{3,12}[ \t]{1,4})?"
    r"([A-Za-z0-9+/_.~-]{8,1024}={0,2})",
    re.IGNORECASE,
)
BEARER = re.compile(r"(?<![A-Za-z])(?:bearer|basic)[ \t]{1,4}([A-Za-z0-9+/_.~-]{12,1024}={0,2})", re.IGNORECASE)
# Passwords without an equals sign: login files of programs, command options, database statements.
GIVEN = [
    ("password", re.compile(r"(?<!\S)(?:login|user|account)\s{1,8}\S{1,128}\s{1,8}password\s{1,8}(\S{1,128})")),
    (":", re.compile(r"(?m)^[\w.*-]{1,128}:(?:\d{2,5}|\*):[\w.*-]{1,64}:[\w.*-]{1,64}:(\S{4,128})$")),
    ("-u", re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =]{1,2}['\"]?[^\s:'\"]{1,128}:([^\s'\"]{4,256})")),
    (
        "=",  # environment variables: a value may have any character
        re.compile(
            r"(?m)^[ \t]{0,16}(?:export[ ]|set[ ]|-[ ])?[A-Z0-9_]{0,64}(?:PASSWORD|PASSWD|PASSPHRASE|PWD|_PASS)="
            r"([^\s\"'`]{6,512})[ \t]{0,16}$"
        ),
    ),
    ("sshpass -p", re.compile(r"(?<!\S)sshpass -p ?['\"]?([^\s'\"]{6,256})")),
    (
        "--",
        re.compile(
            r"(?<!\S)--(?:[a-z]{1,16}-){0,3}(?:password|passwd|passphrase|token|secret|api-key)[ ]"
            r"['\"]?([^\s'\"]{6,256})"
        ),
    ),
    ("mysql", re.compile(r"(?<!\w)mysql(?:dump|admin)?[ ](?:[^\n]{0,200}?[ ])?-p['\"]?([^\s'\"]{6,128})")),
]
SQL = re.compile(r"(identified[ ]by|password)[ ]{1,4}'([^'\n]{4,128})'", re.IGNORECASE)

# Settings are found by the ends of their names, in lower case, followed by an equals sign or colon and a value, quoted
# or up to a space, possibly on the next line.
NAME = re.compile(
    r"passw(?:or)?d|passwrd|passphrase|pwd|secret|token|credentials?|_auth|userpass|"
    r"(?<=[a-z_.-])(?<!public)(?<!public[_.-])key"
)
VALUE = re.compile(
    r"s?(?:[_.-](?:[iI]d|value|data|hash|base64|string|text)){0,2}\d?[\\\"'`\]]{0,4}[ \t]{0,16}"
    r"(?:(?:=>|:=|==?|:(?!:))(?:[ \t]{0,16}\\?\r?\n)?[ \t]{0,64}|</key>\s{0,32}<string>|>)"
    r"(?:[bBrRfFuU]{0,2}(?:\\[\"'`]([^\"'`\\\r\n]{1,512})|(?:\"\")?\"((?:[^\"\\\r\n]|\\.){1,512})"
    r"|(?:'')?'((?:[^'\\\r\n]|\\.){1,512})|`([^`\r\n]{1,512}))"
    r"|([^\s\"'`<>(){}\[\],;&|\\]{6,512}+)(?![(\[]))"
)
UNQUOTED = 5  # the group of a value without quotes
# Continuation of a long value: the rest of it, and lines of base64 that it is wrapped to.
REST = re.compile(r"[A-Za-z0-9+/=_.~-]*+(?:\\?\r?\n[ \t>#]{0,16}[A-Za-z0-9+/]{24,}+={0,2}(?=[\s\"',;]|\Z))*+")
JUDGED_CHARACTERS = 64  # per value
PASSWORD_NAMES = ("pass", "pwd", "_auth", "userpass")

EXAMPLE_MARK = re.compile(
    r"example|placeholder|change.?me|redacted|x{4,}|\*{3,}|\.{3,}|…|(?<![a-z])your", re.IGNORECASE
)
WORD_OR_NUMBER = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+|[^\w\s-]")
EXAMPLE_WORDS = frozenset(
    """
    a access admin an api auth authentication bar baz client credential credentials db default demo dummy env false file
    foo for from here hidden id in is key login long my mysql name new nil no none not null of old on optional pass
    passphrase passwd password path postgres private prompt random redis required root sample secret server some stdin
    string strong super test testing text the this to token true type undefined unset user username value very with yes
    1 2 12 123 1234 12345 123456 12345678
    """.split()  # noqa: SIM905
)
# Variables, templates, dotted names, URLs, paths, regular expressions.
CODE = re.compile(
    r"\$\{|\$\(|^\$(?:[A-Z_][A-Z0-9_]*|[A-Za-z_]+)$|^%\w+%$|\{\{|\{\w*\}|%[sdr](?![0-9a-fA-F])|%\(|\w\(\)$|"
    r"^<|^[\[({][\w .-]+[\])}]$|^[&*!@][A-Za-z_]+$|^--[a-z]|^https?://|^\^.*[$*+]$|\\[wds]|\[\^?[a-z0-9]-|"
    r"^[A-Za-z_]+(?:(?:\.|::|->|=)[A-Za-z_]+)+$|^[a-z0-9_-]+(?:/[a-z0-9_.-]+){2,}$|^(?:~|\.{1,2})?/[a-z._/-]+$|"
    r"^(?:/|~/)(?:etc|var|home|run|usr|tmp|path|opt|root|proc|dev|mnt|srv|secrets?)/"
)


def credentials(text: str) -> Iterator[tuple[Span, str]]:
    """Yield ((start, end), kind) of every credential found, unordered; they may overlap."""
    for span in _private_keys(text):
        yield span, "private_key"
    for literals, expression in COMPILED:
        if any(literal in text for literal in literals):
            for match in expression.finditer(text):
                group = 1 if expression.groups else 0
                if not _is_documented_example(match[group]):
                    yield match.span(group), "token"
    if "://" in text:
        for match in USER_INFO.finditer(text):
            value = match[1] or match[2]
            if not _is_placeholder(value) and (match[1] or looks_random(value, 16)):
                yield match.span(1 if match[1] else 2), "address_password"
    yield from _in_headers(text)
    yield from _in_settings(text)


def _private_keys(text: str) -> Iterator[Span]:
    """Yield private keys from BEGIN to END, or without END, as far as the text looks like a key."""
    if "PRIVATE KEY" in text:
        begin = None
        for mark in KEY_MARK.finditer(text):
            if begin is not None:
                ends = mark[1] == "END" and mark.start() - begin.end() <= KEY_CHARACTERS
                yield from _key(text, begin, mark.end() if ends else _end_of_rest(text, begin, mark.start()))
            begin = mark if mark[1] == "BEGIN" else None
        if begin is not None:
            yield from _key(text, begin, _end_of_rest(text, begin, len(text)))
    if "PuTTY-User-Key-File" in text:
        for match in PUTTY_KEY.finditer(text):
            yield match.span()


def _end_of_rest(text: str, begin: re.Match, limit: int) -> int:
    rest = KEY_REST.match(text, begin.end(), min(limit, begin.end() + KEY_CHARACTERS))
    return begin.end() if rest is None else rest.end()


def _key(text: str, begin: re.Match, end: int) -> Iterator[Span]:
    if KEY_BODY.search(text, begin.end(), end):
        yield begin.start(), end


def _in_headers(text: str) -> Iterator[tuple[Span, str]]:
    lower = text.lower()
    if "authorization" in lower:
        for match in AUTHORIZATION.finditer(text):
            value = match[1]
            a_word = value.islower() or value.isupper() or value.istitle()
            if not _is_placeholder(value) and (_mixed(value) or (value.isalpha() and not a_word)):
                yield match.span(1), "token"
    if "bearer" in lower or "basic" in lower:
        for match in BEARER.finditer(text):
            if looks_random(match[1], 12):
                yield match.span(1), "token"


def _in_settings(text: str) -> Iterator[tuple[Span, str]]:
    done = 0
    for name in NAME.finditer(_lower(text)):
        match = VALUE.match(text, name.end()) if name.start() >= done else None
        if match is None:
            continue
        group = match.lastindex
        assert group is not None  # each form of a value is a group
        if _secret_in_setting(name[0], match[group], quoted=group != UNQUOTED):
            start, done = match.span(group)
            if done - start >= 40 and (rest := REST.match(text, done)):
                done = rest.end()
            yield (start, done), "setting"
    for literal, expression in GIVEN:
        if literal in text:
            for match in expression.finditer(text):
                if _secret_in_setting("password", match[1], quoted=False):
                    yield match.span(1), "setting"
    for match in SQL.finditer(text) if " '" in text else ():
        if _secret_in_setting("password", match[2], quoted=match[1].isupper()):  # lower case may be prose
            yield match.span(2), "setting"


def _lower(text: str) -> str:
    """Return a text in lower case with every character at its original index."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(character.lower() if character.isascii() else character for character in text)


def _is_documented_example(token: str) -> bool:
    """Return whether a token is a documented example, such as AKIAIOSFODNN7EXAMPLE."""
    return "EXAMPLE" in token.upper() or len(set(token[-16:].lower())) < 5


def _is_placeholder(value: str) -> bool:
    """Return whether a value is a placeholder for a secret (your-password, $TOKEN, config.secret)."""
    value = value[:JUDGED_CHARACTERS]
    if EXAMPLE_MARK.search(value) or CODE.search(value):
        return True
    return all(part.lower() in EXAMPLE_WORDS for part in WORD_OR_NUMBER.findall(value))


def _secret_in_setting(name: str, value: str, quoted: bool) -> bool:
    """Return whether the value of setting `name` is a credential, not an example, a word or a piece of code."""
    value = value[:JUDGED_CHARACTERS].strip()
    if " " in value:
        return False
    if not name.startswith(PASSWORD_NAMES):
        return looks_random(value, 12)
    value = value.rstrip(".,:")
    shaped = len(value) >= 6 and (_mixed(value) or (quoted and value.isalnum()))
    return shaped and not _is_placeholder(value)


def _mixed(value: str) -> bool:
    """Return whether a value has letters, and digits or the special characters of typical passwords."""
    return any(map(str.isalpha, value)) and any(
        character.isdigit() or not (character.isalnum() or character in "_-./:") for character in value
    )


def looks_random(value: str, minimum: int) -> bool:
    """Return whether a value of at least `minimum` characters has the letters, digits and entropy of a key."""
    body = value.rstrip("=")
    if len(value) < minimum or not any(map(str.isalpha, body)):
        return False
    if not any(map(str.isdigit, body)) and not _changes_case(body):
        return False
    return entropy(body) >= 3.0 and not _is_placeholder(value)


def _changes_case(value: str) -> bool:
    """Return whether letters alone are a key: case changes about every second letter; in namesLikeThis, every third."""
    if len(value) < 20 or value.islower() or value.isupper():
        return False
    changes = sum(before.isupper() != after.isupper() for before, after in itertools.pairwise(value))
    return changes >= 0.4 * len(value)


def entropy(value: str) -> float:
    """Return the Shannon entropy of a value's characters, in bits per character."""
    counts = Counter(value).values()
    return math.log2(len(value)) - sum(count * math.log2(count) for count in counts) / len(value)
