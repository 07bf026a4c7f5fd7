"""Backends that need a server: Valkey or Redis, and S3, against the rules of all backends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rclone_server
from engines import wait_until
from ppengine.store.backend import Backend, BackendError, Usage
from ppengine.store.backend_kinds import make_backend
from rclone_server import RcloneServer, rclone_binary
from s3_server import s3_server
from store_contract import SIZE, Contract, page_view, read
from valkey_server import WHY_SKIPPED, Server, server_binary


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    binary = server_binary()
    if binary is None:
        pytest.skip(WHY_SKIPPED)
    server = Server(binary, tmp_path)
    yield server
    server.stop()


@pytest.fixture
def valkey(server: Server) -> Contract:
    return Contract(lambda: make_backend("valkey"), server.url)


@pytest.fixture(scope="module", params=["calls of s3_server.py", "rclone"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve S3 by a real server, and by one whose listings have pages of few keys."""
    if request.param != "rclone":
        with s3_server() as address:
            yield address
        return
    binary = rclone_binary()
    if binary is None:
        pytest.skip(rclone_server.WHY_SKIPPED)
    server = RcloneServer(binary, tmp_path_factory.mktemp("s3"))
    yield server.endpoint
    server.kill()


@pytest.fixture
def s3(endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Contract:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.SECRET)
    url = f"s3://bucket/{request.node.originalname}?endpoint={endpoint}"
    return Contract(lambda: make_backend("s3"), url)


def test_valkey_objects(valkey: Contract) -> None:
    valkey.check_objects()


def test_valkey_clear(valkey: Contract) -> None:
    valkey.check_clear()


def test_valkey_quota(valkey: Contract) -> None:
    valkey.check_quota()


def test_valkey_reopen(valkey: Contract) -> None:
    valkey.check_reopen()


def test_valkey_shares(valkey: Contract) -> None:
    valkey.check_shares()


def test_engines_that_share_a_server_share_its_quota(valkey: Contract) -> None:
    first, second = valkey.open(quota=2 * SIZE), valkey.open(quota=2 * SIZE)
    first.write("0.0/ab/1", page_view(bytes(SIZE)))
    second.write("0.0/ab/2", page_view(bytes(SIZE)))
    assert first.usage().used_bytes == second.usage().used_bytes == 2 * SIZE
    read(first, "0.0/ab/1")
    second.write("0.0/ab/3", page_view(bytes(SIZE)))
    assert first.find(["0.0/ab/1", "0.0/ab/2", "0.0/ab/3"]) == [True, False, True]
    assert (first.usage().evicted, second.usage().evicted) == (0, 1)
    first.close()
    second.close()


def test_an_object_that_the_server_has_dropped_is_no_longer_counted(valkey: Contract, server: Server) -> None:
    """With `maxmemory` the server deletes objects by itself."""
    backend = valkey.open()
    backend.write("0.0/ab/1", page_view(bytes(SIZE)))
    backend._client.delete("ppkv:0.0/ab/1")  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        read(backend, "0.0/ab/1")
    assert backend.usage().used_bytes == 0
    backend.close()


def shrink(backend: Any, share: float) -> None:
    """Let the server evict keys by itself until it has a share of its memory, and keep what is left."""
    client = backend._client
    client.config_set("maxmemory-policy", "allkeys-lru")
    before = client.info("stats")["evicted_keys"]
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] * share))
    client.set("other", "x")
    wait_until(lambda: client.info("stats")["evicted_keys"] > before, "the server evicts")
    client.config_set("maxmemory", 0)


def objects(backend: Any) -> int:
    return len(backend._client.keys("ppkv:0.0/*"))


def test_objects_that_the_server_has_evicted_are_not_counted(valkey: Contract, server: Server) -> None:
    backend = valkey.open(quota=400 * SIZE)
    for number in range(300):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    time.sleep(2.1)  # The server's clock of uses counts seconds.
    assert backend.usage().used_bytes == 300 * SIZE
    idle = backend._client.object("idletime", "ppkv:0.0/ab/0")  # type: ignore[attr-defined]
    assert idle >= 2, "a look is no use of an object"
    shrink(backend, 0.6)
    left = objects(backend)
    assert 0 < left < 300 and backend.usage().used_bytes == left * SIZE
    for number in range(300, 900):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    assert objects(backend) <= 400 and backend.usage().used_bytes == objects(backend) * SIZE, "the quota holds"
    backend.close()


@pytest.mark.parametrize("lost", [["uses"], ["sizes"], ["used", "clock"], ["clock"], ["sizes", "used"]])
def test_evicted_books_are_written_again(valkey: Contract, server: Server, lost: list[str]) -> None:
    backend = valkey.open(quota=4 * SIZE)
    for number in range(4):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    client = backend._client  # type: ignore[attr-defined]
    backend.usage()
    client.delete(*(f"ppkv:0.0:{name}" for name in lost))
    backend._dropped = 7  # type: ignore[attr-defined]  # as if the server had said so
    assert backend.usage().used_bytes == 4 * SIZE
    read(backend, "0.0/ab/0")
    for number in (4, 5):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    found = backend.find([f"0.0/ab/{number}" for number in range(6)])
    assert sum(found) == 4 and found[0] and found[4:] == [True, True] and backend.usage().used_bytes == 4 * SIZE
    backend.close()


def test_a_server_that_says_nothing_of_evictions_is_asked_for_usage(valkey: Contract, server: Server) -> None:
    first = valkey.open()
    client = first._client  # type: ignore[attr-defined]
    client.acl_setuser("plain", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all", "-@dangerous"])
    plain = Contract(lambda: make_backend("valkey"), server.url.replace("unix://", "unix://plain:pw@")).open()
    plain.write("0.0/ab/1", page_view(bytes(SIZE)))
    assert plain.usage().used_bytes == SIZE
    first.close()
    plain.close()


def test_a_server_without_room_says_so_first(valkey: Contract, server: Server) -> None:
    backend = valkey.open()
    backend._client.config_set("maxmemory", 1)  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=r"^OOM command not allowed when used memory > 'maxmemory'$"):
        backend.write("0.0/ab/0", page_view(bytes(SIZE)))
    backend._client.config_set("maxmemory", 0)  # type: ignore[attr-defined]
    backend.write("0.0/ab/0", page_view(bytes(SIZE)))
    backend.close()


def test_a_backend_outlives_a_restart_of_its_server(valkey: Contract, server: Server) -> None:
    backend = valkey.open()
    backend.write("0.0/ab/1", page_view(bytes(SIZE)))
    server.stop()
    with pytest.raises(Exception, match="onnect"):
        backend.find(["0.0/ab/1"])
    server.start()
    wait_until(lambda: _answers(backend), "the server answers", 60.0)
    assert backend.find(["0.0/ab/1"]) == [False]
    backend.write("0.0/ab/1", page_view(bytes(SIZE)))
    assert read(backend, "0.0/ab/1") == bytes(SIZE)
    backend.close()


def _answers(backend: Backend) -> bool:
    try:
        backend.usage()
    except Exception:  # noqa: BLE001 - of the client's library
        return False
    return True


@pytest.mark.parametrize("url", ["ftp://host", "nothing"])
def test_a_wrong_url_of_valkey_is_named(url: str) -> None:
    with pytest.raises(BackendError, match=r"it must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"):
        Contract(lambda: make_backend("valkey"), url).open()


# Without an escape, redis-py's errors and its address have the password up to the sign.
@pytest.mark.parametrize("sign", ["/", "?", "#", "?a=", "/?", "\u2100"])
@pytest.mark.parametrize(
    "form", ["redis://:{}@127.0.0.1:9", "rediss://user:{}@127.0.0.1:9/0", "redis://{}@127.0.0.1:9"]
)
def test_no_piece_of_a_password_is_in_an_error_of_valkey(form: str, sign: str) -> None:
    for first in ("se0cret", "90210"):
        with pytest.raises(BackendError, match="it must be redis://HOST:PORT/DB") as caught:
            Contract(lambda: make_backend("valkey"), form.format(f"{first}{sign}tail")).open()
        assert first not in str(caught.value) and "tail" not in str(caught.value)


def test_a_socket_file_may_have_any_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "s@1").symlink_to(server.socket)
    Contract(lambda: make_backend("valkey"), f"unix://{tmp_path}/s@1").open().close()


def test_s3_objects(s3: Contract) -> None:
    s3.check_objects()


def test_s3_clear(s3: Contract) -> None:
    s3.check_clear()


def test_s3_quota(s3: Contract) -> None:
    s3.check_quota()


def test_s3_shares(s3: Contract) -> None:
    s3.check_shares()


def test_s3_objects_outlive_the_process(s3: Contract) -> None:
    """The order of use is that of writing then, in seconds: there is no rule for objects of one moment."""
    backend = s3.open()
    keys = [f"0.0/ab/{number}" for number in range(8)]
    data = os.urandom(SIZE)
    for key in keys:
        backend.write(key, page_view(data))
    backend.close()
    again = s3.open(quota=8 * SIZE)
    assert again.find(keys) == [True] * 8 and again.usage().used_bytes == 8 * SIZE
    assert read(again, keys[7]) == data
    again.write("0.0/ab/8", page_view(data))
    assert again.usage().used_bytes == 8 * SIZE and sum(again.find(keys)) == 7
    again.close()


def test_a_wrong_secret_is_refused(
    s3: Contract, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "rclone" not in request.node.name:
        pytest.skip("s3_server.py checks no signature")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(BackendError, match=r"^GET http://127.0.0.1:\d+: 403 Forbidden, SignatureDoesNotMatch, [^<>]*$"):
        s3.open()


def test_a_write_without_a_server_leaves_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call is to delete an object for the quota."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.SECRET)
    with s3_server() as address:
        backend = Contract(lambda: make_backend("s3"), f"s3://bucket/p?endpoint={address}").open(quota=2 * SIZE)
        for number in range(2):
            backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    with pytest.raises(BackendError, match=rf"^POST {address}: [^{{}}]*$"):
        backend.write("0.0/ab/2", page_view(bytes(SIZE)))
    assert backend.usage() == Usage(2 * SIZE, 0)
    backend.close()


@pytest.mark.parametrize("url", ["http://bucket", "s3:///prefix", "s3://b?endpiont=x"])
def test_a_wrong_url_of_s3_is_named(url: str) -> None:
    with pytest.raises(BackendError, match="it must be s3://BUCKET/PREFIX"):
        Contract(lambda: make_backend("s3"), url).open()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/p?endpoint=http://h&secret_access_key=se0cret",
        "s3://id:se0cret@bucket/p",
        "s3://bucket/p?endpoint=http://id:se0cret@127.0.0.1:9",
        "s3://id:[se0cret]@bucket/p",
        "http://bucket/?se0cret",
        "se0cret",
    ],
)
def test_no_secret_is_in_an_error_of_s3(url: str) -> None:
    with pytest.raises(BackendError, match="it must be s3://BUCKET/PREFIX") as caught:
        Contract(lambda: make_backend("s3"), url).open()
    assert "se0cret" not in str(caught.value)


def test_a_server_that_is_not_there_fails_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")  # Without keys, obstore asks the host's cloud for some.
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(BackendError, match=r"^GET http://127.0.0.1:9: Connection refused$"):
        Contract(lambda: make_backend("s3"), "s3://bucket/p?endpoint=http://127.0.0.1:9").open()
