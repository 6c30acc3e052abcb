import pickle
import random
import string
import time

import pytest
from datatrove.data import Document

from data_pipeline.cleaning.masks import Masks, mask

CHOICE = random.Random(7)
LETTERS = string.ascii_letters + string.digits
BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


def made(length: int, letters: str = LETTERS) -> str:
    """Return a fake credential, joined from pieces here so that no file contains it."""
    return "a1" + "".join(CHOICE.choice(letters) for _ in range(length - 2))


AWS_ID = "AKIA" + "".join(CHOICE.choice(BASE32) for _ in range(16))
KEY = "-----BEGIN {0}-----\n" + "\n".join(made(64) for _ in range(6)) + "\n-----END {0}-----"
JSON_WEB_TOKEN = "eyJ" + made(20) + "." + "eyJ" + made(80) + "." + made(43)

SECRETS = {
    "aws id": ("key {} used", AWS_ID),
    "aws secret": ("aws_secret_access_key = {}", "/" + made(39)),
    "aws secret after its id": (AWS_ID + ",{}\n", made(40)),
    "google": ("?key={}&v=1", "AIza" + made(35)),
    "github": ("git clone https://x:{}@github.com/a/b", "ghp_" + made(36)),
    "gitlab": ("{}", "glpat-" + made(20)),
    "slack": ("{}", "xoxb-123456789012-" + made(24)),
    "openai": ("OPENAI_API_KEY={}", "sk-proj-" + made(48)),
    "hugging face": ("login --token {}", "hf_" + made(34)),
    "npmrc": ("//registry.npmjs.org/:_authToken={}", "npm_" + made(36)),
    "npmrc of a private registry": ("//npm.corp.net/:_authToken={}", "3f9a2b1c-77aa-4d1e-9f00-1a2b3c4d5e6f"),
    "npmrc auth": ("_auth = {}", "ZGVwbG95OmszNHg5"),
    "pypirc": ("[pypi]\nusername = __token__\npassword = {}\n", "pypi-" + made(80)),
    "stripe": ("{}", "sk_live_" + made(24)),
    "json web token": ("{}", JSON_WEB_TOKEN),
    "json web token over lines": ("token:\n  {}", JSON_WEB_TOKEN[:60] + "\n  " + JSON_WEB_TOKEN[60:]),
    "password in an address": ("postgres://app:{}@db.corp/x", "Xk9-foo"),
    "password with an @": ("mysql://app:{}@db.corp/x", "p@ss9x"),
    "address without a user": ("redis://:{}@cache:6379", "s3cretpw9"),
    "token as user": ("https://{}@github.com/x", made(40)),
    "environment": ("export DB_PASSWORD={}\n", "hunter22"),
    "quoted": ("password = '{}'", "letmein"),
    "signs of a shell": ("PGPASSWORD='{}'", "p@$$w0rd!x"),
    "apostrophe in quotes": ('password = "{}"', "it's9me!"),
    "escaped quote": ('password = "{}"', 'ab\\"cd9x'),
    "three quotes": ('password = """{}"""', "Qw3rty77"),
    "any sign in the environment": ("export DB_PASSWORD={}\n", "a;b,c9(x"),
    "several": ("passwords: {}", "hunter22"),
    "percent signs": ("ftp://app:{}@corp.com/", "Ab%d4ss%24"),
    "dollar within": ("password: '{}'", "k9abc$word"),
    "letters alone": ('client_secret = "{}"', "aBcDDefGhIjKKlMnoPqRsTuVvwXy"),
    "json": ('{{"password": "{}"}}', "Tr0ub4dor&3"),
    "json in a string": ('"{{\\"password\\": \\"{}\\"}}"', "Zk39xx12"),
    "yaml, on the next line": ("api_token:\n    {}", made(32)),
    "xml": ("<password>{}</password>", "Qw3rty77"),
    "property list": ("<key>Password</key>\n<string>{}</string>", "Qw3rty77"),
    "bearer": ("curl -H 'Authorization: Bearer {}'", made(40)),
    "basic": ("Authorization: Basic {}", "ZGVwbG95OmJsdWVza3k="),
    "curl": ("curl -u admin:{} https://x", "Str0ngPw!"),
    "netrc": ("machine h login me password {}", "Zx8kk2p"),
    "mysql": ("mysql -u root -p{} db", "S3cret99"),
    "sql": ("CREATE USER x IDENTIFIED BY '{}';", "letm3in!"),
    "azure storage": ("AccountName=x;AccountKey={};EndpointSuffix=y", made(86) + "=="),
    "sql server": ("Server=x;Uid=sa;Pwd={};", "Str0ng!Pass9"),
    "base64 over lines": ('"AccountKey": "{}"', made(60) + "\n      " + made(28) + "=="),
    "shadow": ("root:{}:18000:0", "$6$saltsalt$" + made(86)),
    "rsa": ("a\n{}\nb", KEY.format("RSA PRIVATE KEY")),
    "openssh": ("{}", KEY.format("OPENSSH PRIVATE KEY")),
    "pgp": ("{}", KEY.format("PGP PRIVATE KEY BLOCK")),
    "key in json": ('"key": "{}"', KEY.format("PRIVATE KEY").replace("\n", "\\n")),
    "quoted key": ("> {}", KEY.format("PRIVATE KEY").replace("\n", "\n> ")),
    "key without an end": ("{}", KEY.format("RSA PRIVATE KEY")[:250]),
}


@pytest.mark.parametrize("name", SECRETS)
def test_credentials_are_masked_whole(name: str) -> None:
    around, secret = SECRETS[name]
    masked, counts = mask(around.format(secret))
    assert counts.total() >= 1
    assert "<SECRET>" in masked
    # No piece of it is left, wherever in it.
    assert not [start for start in range(len(secret) - 5) if secret[start : start + 6] in masked]


@pytest.mark.parametrize(
    "text",
    [
        "write to user@example.com or admin@db.example.org, or root@localhost",
        "systemctl start getty@tty1.service; logo@2x.png; npm i left-pad@1.3.0; git@github.com:a/b.git",
        "192.0.2.1 198.51.100.7 203.0.113.9 10.0.0.1 172.16.3.4 192.168.1.1 127.0.0.1 169.254.169.254 255.255.255.0",
        "nameserver 8.8.8.8; ::1 fe80::1 2001:db8::7; at 12:30:45; std::vector",
        "version 1.2.3.4, v4.5.6.7, foo-1.2.3.4.tar.gz, pip install x==1.2.3.4, Version=4.5.6.7, 1.3.6.1.4.1",
        "text\n3.2.1.4 Setting up the network\nmore",
        "AKIAIOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "password=$PASSWORD PASSWORD=${PW} password: string, token = get_token(x), key=os.environ['KEY']",
        "client_secret = getClientSecretFromTheServer",
        "api_key = config.api_key; token=auth2token(x); --password PASSWORD --token <token>",
        'password="your-password-here" password=xxxxxxxx Password=******** secret: changeme',
        "https://user:password@host/ https://<user>:<pass>@host/ https://user:${PW}@host/",
        "Authorization: Bearer <token>, Authorization: Bearer $TOKEN, Authorization: Negotiate, basic authentication",
        "authorization: required; --match-token LABEL=label",
        "commit 3f9a2b1c77aa4d1e9f001a2b3c4d5e6f7a8b9c0d, tokens: 2048, pad_token='[PAD]', passwd: files systemd",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        "--secret=projects/my-project/secrets/my-secret/versions/2 password-file=/etc/secrets/db1",
    ],
)
def test_what_documents_show_on_purpose_stays(text: str) -> None:
    assert mask(text)[0] == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to jane.o'doe+x@corp.co.uk, now", "to <EMAIL>, now"),
        ("<josé@españa.es>", "<<EMAIL>>"),
        ("email=joe@corp.com;", "email=<EMAIL>;"),
        ("from 61.177.172.13 port 22", "from <IP_ADDRESS> port 22"),
        ("rhost=61.177.172.13", "rhost=<IP_ADDRESS>"),
        ("[61.177.172.13]:22", "[<IP_ADDRESS>]:22"),
        ("5.9.12.3 - - [1/Jan]", "<IP_ADDRESS> - - [1/Jan]"),
        ("to 2a02:8109:9a3f:d2b4::1.", "to <IP_ADDRESS>."),
        ("ssh://u:k3yboard9@61.177.172.13/", "ssh://u:<SECRET>@<IP_ADDRESS>/"),
    ],
)
def test_addresses_are_masked_and_nothing_around_them(text: str, expected: str) -> None:
    assert mask(text)[0] == expected


def test_equal_values_have_equal_placeholders_in_a_document() -> None:
    text = "61.1.1.1 to 62.2.2.2, then 61.1.1.1"
    assert mask(text)[0] == "<IP_ADDRESS> to <IP_ADDRESS_2>, then <IP_ADDRESS>"


@pytest.mark.parametrize("name", SECRETS)
def test_masking_twice_changes_nothing(name: str) -> None:
    masked, _ = mask(SECRETS[name][0].format(SECRETS[name][1]) + " a@b.com 61.1.1.1\nListenPort=51820a")
    assert mask(masked)[0] == masked


HOSTILE = {
    "letters": "a",
    "mail": "a@a.",
    "quotes": "a'",
    "addresses": "1.1.1.1",
    "colons": "2001:",
    "users": "://a:",
    "settings": "password1=",
    "tokens": "token1:",
    "wrapped settings": "password: \\\n",
    "begin": "-----BEGIN PRIVATE KEY-----",
    "begin and a line": "-----BEGIN PRIVATE KEY-----\nAAAA\n",
    "putty": "PuTTY-User-Key-File-2:\n",
    "web tokens": "eyJ" + "a" * 30 + "\n",
    "dotted web tokens": "eyJaaaaaaaa.",
    "keys": "sk-",
    "aws": "AKIA" + "B" * 16 + " ",
    "commands": "mysql -",
    "headers": "authorization: ",
    "hashes": "$1$",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_time_is_linear_in_hostile_text(name: str) -> None:
    unit = HOSTILE[name]

    def seconds(length: int) -> float:
        start = time.process_time()
        mask(unit * (length // len(unit)))
        return time.process_time() - start

    small, large = seconds(8_000), seconds(128_000)
    assert large < 0.25 + 40 * small  # 16 times as long; if it were quadratic, 256


def test_a_step_masks_text_and_url_and_counts_by_kind() -> None:
    step = pickle.loads(pickle.dumps(Masks()))
    document = Document("mail a@b.com", "1", metadata={"url": "https://u:k3yboard9@corp.com/x", "origin": "f"})
    [masked] = step.run([document])
    assert (masked.text, masked.metadata["url"]) == ("mail <EMAIL>", "https://u:<SECRET>@corp.com/x")
    assert step.stats["masked_email"].total == 1
