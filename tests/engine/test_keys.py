"""Files of keys: modes, links, races, and lines that people write."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from ppengine.common.curve import make_keypair
from ppengine.gateway.keyring import Keyring
from ppengine.gateway.rate_limits import BYTES_MOST, COMMANDS_MOST, COMMANDS_S, RateLimits
from ppengine.protocol.allowed_keys import AllowedKey, allow, parse, read_allowed, revoke
from ppengine.protocol.keys import KeyFileError, Keypair, check_key, keys_dir, own_keypair, read_keypair, write_private

ONE, TWO = "1" * 64, "2" * 64


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return keys_dir()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_private_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        pair = own_keypair("client", make_keypair)
        allow(folder / "allowed", AllowedKey("viewer", ONE, "eve"))
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder / "client.key"), mode(folder / "allowed")) == (0o700, 0o600, 0o600)
    assert own_keypair("client", make_keypair) == pair, "made once"
    assert pair.secret not in repr(pair)


def test_processes_that_make_a_key_at_once_get_the_same(folder):
    with ThreadPoolExecutor(8) as pool:
        pairs = list(pool.map(lambda _: own_keypair("server", make_keypair), range(16)))
    assert len({pair.public for pair in pairs}) == 1
    assert [path.name for path in folder.iterdir()] == ["server.key"]


@pytest.mark.parametrize("wide", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_reach_is_refused_by_name_and_mode(folder, wide):
    own_keypair("client", make_keypair)
    path = folder / "client.key"
    path.chmod(wide)
    with pytest.raises(KeyFileError, match=rf"client\.key has mode {wide:04o}: .*chmod 0600"):
        own_keypair("client", make_keypair)


def test_a_folder_that_others_can_reach_is_refused(folder):
    folder.chmod(0o755)
    with pytest.raises(KeyFileError, match=r"keys has mode 0755: .*chmod 0700"):
        keys_dir()


def test_a_link_in_place_of_a_key_is_refused(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_private(elsewhere, b"{}")
    (folder / "client.key").symlink_to(elsewhere)
    with pytest.raises(KeyFileError, match=r"client\.key is a link to .*elsewhere; it must be a file"):
        own_keypair("client", make_keypair)
    (folder / "allowed").symlink_to(elsewhere)
    with pytest.raises(KeyFileError, match="is a link to"):
        read_allowed(folder / "allowed")


@pytest.mark.parametrize("text", [b"", b"{}", b'{"public": "x", "secret": "y"}', b"\xff", b"[" * 100_000])
def test_a_file_without_a_keypair_is_refused(folder, text):
    write_private(folder / "client.key", text)
    with pytest.raises(KeyFileError, match="has no keypair; remove it"):
        read_keypair(folder / "client.key")


@pytest.mark.parametrize("text", ["", "1" * 63, "1" * 65, "G" * 64, "A" * 64, f"{ONE}\n"])
def test_a_key_has_64_hex_digits(text):
    with pytest.raises(KeyFileError, match="is no key; a key has 64 digits"):
        check_key(text)


def test_a_bad_line_allows_nobody_and_costs_no_other_line():
    keys, problems = parse(
        f"# people\noperator {ONE} alice  # since May\nroot {TWO} mallory\nviewer {TWO}\n\n"
        f"viewer {ONE} again\nviewer {TWO} alice\nviewer {TWO} owner\nadmin {TWO} bob\n"
    )
    assert keys == [AllowedKey("operator", ONE, "alice"), AllowedKey("admin", TWO, "bob")]
    assert [problem.partition(":")[0] for problem in problems] == ["line 3", "line 4", "line 6", "line 7", "line 8"]
    assert "'root' is no role; the roles are viewer, operator, admin" in problems[0]


def test_allow_and_revoke_leave_other_lines_as_they_are(folder):
    path = folder / "allowed"
    write_private(path, f"# people\nnonsense\nviewer {ONE} eve\n".encode())
    allow(path, AllowedKey("operator", TWO, "bob"))
    with pytest.raises(KeyFileError, match="has this name: operator bob"):
        allow(path, AllowedKey("admin", "3" * 64, "bob"))
    with pytest.raises(KeyFileError, match="has this key: viewer eve"):
        allow(path, AllowedKey("admin", ONE, "eve2"))
    assert revoke(path, "eve").key == ONE
    with pytest.raises(KeyFileError, match="no key named 'eve'; its names: bob"):
        revoke(path, "eve")
    assert path.read_text() == f"# people\nnonsense\noperator {TWO} bob\n"


def test_revoking_takes_every_line_of_the_key(folder):
    path = folder / "allowed"
    write_private(path, f"operator {ONE} eve\nviewer {ONE} again\nadmin {TWO} eve\n".encode())
    revoke(path, "eve")
    assert read_allowed(path) == ([], [])


def test_a_keyring_follows_its_files_and_counts_revocations(folder):
    ring, path = Keyring(folder), folder / "allowed"
    own = own_keypair("client", make_keypair).public
    assert ring.principal(own).role == "admin", "made after the ring"
    allow(path, AllowedKey("viewer", ONE, "eve"))
    assert ring.principal(ONE).role == "viewer" and ring.revocations == 0
    allow(path, AllowedKey("operator", TWO, "bob"))
    assert ring.accepts(TWO) and ring.revocations == 0
    revoke(path, "eve")
    assert not ring.accepts(ONE) and ring.accepts(TWO) and ring.revocations == 1
    path.chmod(0o644)
    assert not ring.accepts(TWO) and ring.accepts(own) and ring.revocations == 2
    *changes, error = ring.take_news()
    assert [text for _, text in changes] == [
        "key eve is viewer", "key bob is operator", "key eve is revoked", "key bob is revoked",
    ]  # fmt: skip
    assert error[0] == "keys.error" and "mode 0644" in error[1] and "none of its keys" in error[1]
    assert ring.take_news() == []
    (folder / "client.key").unlink()
    assert not ring.accepts(own)


def test_the_key_that_the_first_console_makes_is_no_change_and_another_one_is(folder):
    ring = Keyring(folder)
    own = own_keypair("client", make_keypair)
    assert ring.accepts(own.public) and ring.take_news() == []
    (folder / "client.key").unlink()
    assert not ring.accepts(own.public)
    other = own_keypair("client", make_keypair)
    assert ring.accepts(other.public)
    assert [text for _, text in ring.take_news()] == ["key owner is revoked", "key owner is admin"]


def test_limits_are_of_each_key_and_fill_again():
    limits = RateLimits()
    assert all(limits.take(ONE, 0, 0.0) == 0.0 for _ in range(int(COMMANDS_MOST)))
    wait = limits.take(ONE, 0, 0.0)
    assert wait == pytest.approx(1 / COMMANDS_S)
    assert limits.take(TWO, 0, 0.0) == 0.0
    assert limits.take(ONE, 0, wait + 1e-9) == 0.0
    assert limits.take(TWO, int(BYTES_MOST) + 1, 1.0) > 0.0
    assert limits.take(TWO, int(BYTES_MOST), 1.0) == 0.0 and limits.take(TWO, 1000, 1.0) > 0.0


def test_the_pair_of_another_user_is_never_written_over(folder):
    pair = Keypair(ONE, TWO)
    assert own_keypair("server", lambda: pair) == pair
    assert own_keypair("server", make_keypair) == pair
