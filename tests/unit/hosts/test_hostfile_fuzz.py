"""Ten thousand damaged host files.

Each is a list of hosts, or an error that names a line and a column (exit 2).
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import pytest

from zrun import cli
from zrun.hosts.backend import HostOptions, wanted_hosts
from zrun.hosts.hostfile import HostEntry
from zrun.transport.ssh import ssh_argv
from zrun_core.errors import ExitCode, JobError
from zrun_core.spine.config import JobConfig

NUM_FILES = 10_000
_PLACE = re.compile(r"hf:[1-9]\d*:[1-9]\d*: ")
_AS_A_WHOLE = re.compile(r"names no host|is a binary file")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SEEDS = (
    "# rack 1\nnode1 slots=8\nnode2 slots=8 # slow\n\nme@node3:2222 slots=4\n",
    "10.0.0.1 slots=8\n10.0.0.2 slots=8 max_slots=16\n[fd00::7]:22 slots=1\nfe80::1%eth0\n",
    "worker-1.lab.example slots=1024\r\nworker-2.lab.example\r\n",
    "localhost:2201 slots=2\nlocalhost:2202 slots=2\n",
)
_ODD_WORDS = (
    "-oProxyCommand=touch${IFS}x",
    "-",
    "--",
    "$(id)",
    "`id`",
    ";reboot",
    "a|b",
    "a&b",
    "a>b",
    "a'b",
    'a"b',
    "a\\b",
    "*",
    "~",
    "a/b",
    "../x",
    "!a",
    "{a,b}",
    "%",
    "\x00",
    "\x1b[31m",
    "\r",
    "\x0b",
    "\x0c",
    "\x85",
    "\xa0",
    "\u2028",
    "\u202e",
    "é",
    "😀",
    "٣",
    "slots=0",
    "slots=-1",
    "slots=8x",
    "slots=",
    "slots",
    "=8",
    "slots=" + "9" * 5000,
    "SLOTS=4",
    "max-slots=1",
    "gpus=8",
    "a" * 300,
    "a." * 200,
    "::",
    ":::",
    "[",
    "]",
    "[]",
    "[[::1]]",
    "[::1]:",
    "[::1]:0",
    "::1%",
    "::1%-x",
    "1.2.3",
    "256.1.1.1",
    "0x7f.1",
    "0x",
    "017700000001",
    "node1:8",
    "node1:-22",
    "node1:22:22",
    "@",
    "a@",
    "@a",
    "a@b@c",
    "-a@b",
    "a@-b",
    "me@[-x]",
    "#",
    "node1",
    "NODE1",
)


def _flip_bytes(text: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _odd_word(text: bytes, rng: random.Random) -> bytes:
    """Put an odd word before a word, or in its place."""
    word = rng.choice(list(re.finditer(rb"\S+|$", text)))
    start, end = word.start(), rng.choice(word.span())
    return (
        text[:start] + rng.choice(_ODD_WORDS).encode() + rng.choice((b"", b" ", b"\n")) + text[end:]
    )


def _repeat_line(text: bytes, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def _insert_byte(text: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(text) + 1)
    return text[:place] + bytes([rng.choice(b" \t\n\r#=:@[]-.%,$;'\"\\")]) + text[place:]


def _cut_out(text: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[:first] + text[last:]


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip_bytes,
    _odd_word,
    _odd_word,
    _repeat_line,
    _insert_byte,
    _insert_byte,
    _cut_out,
)


def _damaged(rng: random.Random) -> bytes:
    text = rng.choice(_SEEDS).encode()
    for _ in range(rng.randint(1, 3)):
        text = rng.choice(_DAMAGES)(text, rng) or b"\n"
    return text


def _check(entry: HostEntry) -> None:
    if ":" in entry.name:
        ip_address(entry.name)
    else:
        assert _PLAIN_NAME.fullmatch(entry.name), entry
    assert entry.user is None or re.fullmatch(r"[A-Za-z0-9_][\w.-]*\$?", entry.user, re.ASCII), (
        entry
    )
    assert entry.port is None or 22 <= entry.port <= 65535, entry
    assert entry.slots is None or 1 <= entry.slots <= 1024, entry
    argv = ssh_argv(entry, "ssh", "/usr/bin/python3", 10)
    assert argv[-3:-1] == ["--", entry.name]


@pytest.mark.thorough
def test_damaged_host_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    path = Path("hf")
    config = JobConfig.model_validate(
        {"name": "a", "model": "m:f", "data": "d:g", "steps": 1, "batch": 1}
    )
    num_lists = 0
    for _ in range(NUM_FILES):
        text = _damaged(rng)
        path.write_bytes(text)
        try:
            entries = wanted_hosts(config, HostOptions(hosts=path), {}, Path())
        except JobError as error:
            message = str(error)
            assert _PLACE.search(message) or _AS_A_WHOLE.search(message), (text, message)
            assert all(line.isprintable() for line in message.splitlines()), (text, message)
            assert len(message) < 20_000
        else:
            num_lists += 1
            assert entries, text
            for entry in entries:
                _check(entry)
    assert (
        0.05 * NUM_FILES < num_lists < 0.6 * NUM_FILES
    )  # the damage is neither harmless nor total


def test_damaged_lists_and_picks() -> None:
    rng = random.Random(1)
    config = JobConfig.model_validate(
        {"name": "a", "model": "m:f", "data": "d:g", "steps": 1, "batch": 1}
    )
    pieces = (
        *_ODD_WORDS,
        "h1",
        "h2:8",
        "me@h3:2",
        "[::1]:4",
        "h1:0,1",
        "h2",
        ":",
        ",",
        "@",
        "",
        "h2:9",
        "h1:0,0",
    )
    outcomes = set()
    for _ in range(3000):
        listed = ",".join(
            rng.choices(pieces[-13:] if rng.random() < 0.8 else pieces, k=rng.randint(1, 3))
        )
        picks = "@".join(rng.choices(pieces[-13:], k=rng.randint(1, 3)))
        options = HostOptions(host_list=listed, **{rng.choice(("include", "exclude")): picks})
        try:
            entries = wanted_hosts(config, options, {}, Path())
        except JobError as error:
            outcomes.add(str(error).partition(":")[0])
        else:
            assert entries, options
            outcomes.add("")
            for entry in entries:
                _check(entry)
                assert entry.chosen is None or (
                    entry.chosen and list(entry.chosen) == sorted(set(entry.chosen))
                )
    assert {"", "-H", "--include", "--exclude"} <= outcomes


def test_the_command_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("name: a\nmodel: m.py:f\ndata: m.py:g\nsteps: 1\nbatch: 1\n")
    monkeypatch.setattr(
        sys, "argv", ["zrun", "check", "job.yaml", "--no-import", "--offline", "--hosts", "hf"]
    )
    rng = random.Random(2)
    codes = set()
    for _ in range(40):
        Path("hf").write_bytes(_damaged(rng))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        codes.add(ended.value.code or 0)
        assert "Traceback" not in capsys.readouterr().err
    assert codes == {ExitCode.OK, ExitCode.USAGE}
