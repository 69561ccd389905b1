"""A user and all ids that /etc/subuid gives it are one account, and so one tenant where each user is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from membrokerd.edge.handoff.endpoint import HandoffEndpoint
from membrokerd.system.accounts import Accounts

PASSWD = "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nbob:x:1001:1001::/home/bob:/bin/sh\n"
SUBUID = "alice:100000:65536\nbob:165536:65536\nalice:900000:10\n"


def accounts(etc: Path, subuid: str = SUBUID) -> Accounts:
    (etc / "passwd").write_text(PASSWD)
    (etc / "subuid").write_text(subuid)
    return Accounts(etc)


def test_a_range_counts_as_its_owner(tmp_path: Path) -> None:
    """With newuidmap, alice runs a process under each of her ids: they have one limit together, and bob has another."""
    found = accounts(tmp_path)
    alice = [1000, 100_000, 100_001, 165_535, 900_000, 900_009]
    assert {found.owner_of(uid) for uid in alice} == {1000}
    assert {found.owner_of(uid) for uid in (1001, 165_536, 231_071)} == {1001}
    for uid in (0, 99_999, 231_072, 899_999, 900_010, 65_534):
        assert found.owner_of(uid) == uid
    # Owners of a directory service: asking it could take seconds, and the event loop waits for nobody.
    found = accounts(tmp_path, "5000:100000:10\ncarol:200000:10\ncarol:300000:10\n")
    assert found.owner_of(100_009) == 5000
    assert {found.owner_of(uid) for uid in (200_000, 200_009, 300_000, 300_009)} == {200_000}


def test_an_account_that_is_added_counts_at_once(tmp_path: Path) -> None:
    found = accounts(tmp_path)
    assert found.owner_of(500_000) == 500_000
    with (tmp_path / "subuid").open("a") as file:
        file.write("dave:500000:65536\n")
    assert found.owner_of(500_007) == 500_000
    with (tmp_path / "passwd").open("a") as file:
        file.write("dave:x:1002:1002::/home/dave:/bin/sh\n")
    assert found.owner_of(500_007) == 1002


def test_files_that_are_wrong_or_missing_change_nothing(tmp_path: Path) -> None:
    assert Accounts(tmp_path).owner_of(100_000) == 100_000
    found = accounts(tmp_path, "alice\n:::\nalice:x:5\nalice:100000:-1\n\xff\nbob:165536:65536\n")
    assert found.owner_of(100_000) == 100_000
    assert found.owner_of(165_536) == 1001
    (tmp_path / "subuid").unlink()
    os.mkfifo(tmp_path / "subuid")
    assert found.owner_of(165_536) == 165_536


def test_an_account_is_one_tenant(tmp_path: Path) -> None:
    """The tenant that is charged: the account where each user is one, and the endpoint's own where it has one."""
    unused: list[Any] = [None] * 6
    default = HandoffEndpoint("default", None, *unused, accounts=accounts(tmp_path))
    assert [default.tenant_of(uid) for uid in (1000, 100_500, 1001)] == ["uid-1000", "uid-1000", "uid-1001"]
    red = HandoffEndpoint("red", "red", *unused, accounts=accounts(tmp_path))
    assert red.tenant_of(100_500) == "red"
