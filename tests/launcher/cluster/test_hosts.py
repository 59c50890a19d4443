"""Hostfile, --include and --exclude are read as DeepSpeed reads them."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdp.engine.errors import LaunchError
from sdp.launcher.cluster.hosts import Host, describe, include_text, parse_slots, read_hostfile, select
from sdp.launcher.cluster.rank import decode, encode, is_safe

THREE = [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1, 2, 3)), Host("worker-2", (0, 1))]


def write(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text)
    return folder / "hosts"


def test_hostfile(tmp_path: Path) -> None:
    text = "# the left rack\nworker-0 slots=4\n\n  worker-1\tslots=4   # half of it\n10.0.0.7 slots=2\n"
    assert read_hostfile(write(tmp_path, text)) == [
        Host("worker-0", (0, 1, 2, 3)),
        Host("worker-1", (0, 1, 2, 3)),
        Host("10.0.0.7", (0, 1)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\na slots=2", r"hosts:2: host a is listed twice"),
        ("a", r"hosts:1: 'a' cannot be read; expected the form worker-0 slots=4"),
        ("a slots=0", r"hosts:1: 'a slots=0' cannot be read"),
        ("a slots=2 max_slots=4", r"cannot be read"),
        ("# nothing\n", r"names no host"),
        ("a;touch slots=2", r"hosts:1: 'a;touch' is not a host name"),
        ("-oProxyCommand=touch slots=2", r"is not a host name"),
        ("n[1-3] slots=2", r"is not a host name"),
        ("a,b slots=2", r"is not a host name"),
        ("$(touch) slots=2", r"is not a host name"),
        ("`touch` slots=2", r"is not a host name"),
        ("a'b slots=2", r"is not a host name"),
        ('a"b slots=2', r"is not a host name"),
        ("user@a slots=2", r"users and ports go to ~/.ssh/config"),
        ("a%h slots=2", r"is not a host name"),
        ("a b slots=2", r"cannot be read"),
    ],
)
def test_hostfile_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        read_hostfile(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_hostfile_missing(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ("", ""),
        ("worker-0", ""),
        ("worker-2@worker-0:3,1", ""),
        ("worker-1:0,0@worker-1:2", ""),
        ("worker-1:1@worker-0:1@worker-2", ""),
        ("", "worker-0"),
        ("", "worker-1:0,3@worker-2"),
        ("", "worker-2:0,1@worker-0:2"),
    ],
)
def test_filters_as_deepspeed_reads_them(include: str, exclude: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    theirs = runner.parse_inclusion_exclusion({host.name: len(host.slots) for host in THREE}, include, exclude)
    ours = select(THREE, include, exclude)
    assert [(host.name, list(host.slots)) for host in ours] == list(theirs.items())
    again = runner.parse_inclusion_exclusion({host.name: len(host.slots) for host in THREE}, include_text(ours), "")
    assert again == theirs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "worker-9"}, "no host 'worker-9', did you mean worker-"),
        ({"include": "worker-2:2"}, "host worker-2 has 2 slots, no slot 2"),
        ({"exclude": "worker-2:x"}, "'worker-2:x' cannot be read"),
        ({"exclude": "worker-2:"}, "cannot be read"),
        ({"include": "worker-0;touch"}, "no host 'worker-0;touch'"),
        ({"include": "worker-0", "exclude": "worker-1"}, "cannot be combined"),
        ({"include": "worker-0", "nodes": 1}, "cannot be combined with"),
        ({"exclude": "worker-0@worker-1@worker-2"}, "no slot of the hostfile remains"),
        ({"nodes": 4}, "the hostfile names only 3 hosts"),
        ({"per_node": 3}, "gives host worker-2 only 2 slots"),
    ],
)
def test_filters_refused(options: dict, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        select(THREE, **options)


def test_first_nodes_and_slots() -> None:
    assert select(THREE, nodes=2, per_node=3) == [Host("worker-0", (0, 1, 2)), Host("worker-1", (0, 1, 2))]


def test_ranks_count_through_hosts_and_slots() -> None:
    hosts = select(THREE, exclude="worker-0:0,2@worker-1")
    assert describe(hosts) == ["ranks 0 to 1 on worker-0, devices 1,3", "ranks 2 to 3 on worker-2, devices 0,1"]
    assert parse_slots(include_text(hosts)) == [[1, 3], [0, 1]]


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_words_survive(word: str) -> None:
    encoded = encode(word)
    assert decode(encoded) == word
    assert encoded
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:,@-+")


@pytest.mark.parametrize(
    ("word", "safe"), [("/opt/py-3.11/bin/python", True), ("a b", False), ("a;b", False), ("-x", False), ("", False)]
)
def test_safe_words(word: str, safe: bool) -> None:
    assert is_safe(word) is safe


def test_a_hostfile_is_a_regular_file_of_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/zero"), tmp_path / "fifo"):
        with pytest.raises(LaunchError, match=r"cannot be read \(it is not a regular file\)"):
            read_hostfile(path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(LaunchError, match=r"cannot be read \(the file is larger than 65,536 KiB\)"):
        read_hostfile(tmp_path / "large")


def test_the_output_of_a_command_can_be_a_hostfile() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"a slots=2\n")
    assert read_hostfile(Path(f"/dev/fd/{reading}")) == [Host("a", (0, 1))]
