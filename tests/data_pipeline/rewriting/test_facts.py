import pytest

from data_pipeline.rewriting.facts import facts, kept_and_invented

FOUND = [
    ("set vm.swappiness to 10 and net.core.rmem_max to 4 MB", {("identifier", "vm.swappiness"), ("number", "4mb")}),
    ("see https://kernel.org/doc/a_b.html, then", {("url", "https://kernel.org/doc/a_b.html")}),
    ("in /etc/fstab and ~/.ssh/config.", {("path", "/etc/fstab"), ("path", "~/.ssh/config")}),
    (r"in C:\Windows\System32 too", {("path", r"C:\Windows\System32")}),
    ("run with --no-cache or -xvf, not with a-b", {("flag", "--no-cache"), ("flag", "-xvf")}),
    ("waits 250 ms, then 1,024 bytes at 3.5GHz, 99%", {("number", n) for n in ("250ms", "1024byte", "3.5ghz", "99%")}),
    ("at 0x7fFF of version 6.1.0", {("number", "0x7fff"), ("number", "6.1.0")}),
    ("CUDA_VISIBLE_DEVICES, ThreadPool, my_function", {("identifier", "CUDA_VISIBLE_DEVICES")}),
    ("```sh\nsudo systemctl restart nginx\n```\n", {("command", "systemctl")}),
    ("```\n$ nvidia-smi -q\nout put\n```\n", {("command", "nvidia-smi"), ("flag", "-q")}),
    ("call `fsync` first", {("code", "fsync")}),
]


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_facts_are_found_by_their_form(text, expected):
    expected = {(kind, name.lower() if kind == "number" else name) for kind, name in expected}
    found = {(kind, name.lower() if kind == "number" else name) for kind, name in facts(text)}
    assert expected <= found


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, e.g. these, i.e. none.",
        "1. first\n2. second",
        "well-known and/or so-called",
        "a - b -- c",
        "It's 3.",
    ],
)
def test_ordinary_words_are_no_facts(text):
    assert facts(text) == {}


def test_a_path_in_a_url_is_one_fact():
    assert len(facts("https://a.example/b/c.d?e_f=10")) == 1


def test_units_and_digits_count_however_they_are_set():
    assert kept_and_invented("waits 1,000 ms on 4 cores", "on 4 core waits 1000ms")[:2] == (1.0, 0.0)
    assert kept_and_invented("holds 10 GB", "holds 10 GiB")[:2] == (0.0, 1.0)
    assert kept_and_invented("holds 10 GB", "holds 210 GB")[0] == 0.0


def test_what_is_lost_and_what_is_new_is_counted():
    source = "Set `net.core.somaxconn` to 4096 in /etc/sysctl.conf and run sysctl with --system."
    rewritten = "With --system, sysctl reads /etc/sysctl.conf, and /etc/other.conf."
    kept, invented, before, after = kept_and_invented(source, rewritten)
    assert (kept, before) == (2 / 4, 4)
    assert (invented, after) == (1 / 3, 3)
    assert kept_and_invented(source, rewritten, known="the file /etc/other.conf")[1] == 0.0


def test_a_name_within_a_longer_one_is_not_invented():
    assert kept_and_invented("call os.path.join_all", "`join_all`")[1] == 0.0


def test_no_facts_are_nothing_to_judge():
    assert kept_and_invented("words", "other words") == (1.0, 0.0, 0, 0)
