"""The API at a Unix socket: its address, the file and its rights, and callers that a port without keys would refuse."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from http_world import HttpWorld
from ppengine.common.config import ConfigError, Profile
from ppengine.common.http_address import parse_http, takes_connections
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.common.socket_files import hold_socket, remove_socket
from ppengine.http.api_keys import ApiKeys
from ppengine.http.listener import listen
from ppengine.protocol.discovery import SOCKET_PATH_MOST
from ppengine.supervisor import http_port
from typing_extensions import override


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with TemporaryDirectory(prefix="pp-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("text", ["unix:/run/a b.sock", "unix:///run/a b.sock"])
def test_an_address_may_be_a_path(text: str) -> None:
    address = parse_http(text)
    assert (address.path, str(address), address.base_url) == ("/run/a b.sock", "unix:/run/a b.sock", str(address))
    assert address.loopback and parse_http(str(address)) == address
    assert parse_http("[::1]:80").base_url == "http://[::1]:80/v1"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("unix:", "it must be"), ("unix:a.sock", "with the whole path of a Unix socket"), ("unix:/", "it must be"),
        ("unix:/run/", "it must be"), ("unix://run/a.sock", "whole path"), ("unix:////run/a", "whole path"),
        ("unix:/a\0b", "it must be"), ("unix:/a\nb", "it must be"),
        ("/run/a.sock", "or unix:/PATH"),
        ("unix:/" + SOCKET_PATH_MOST * "x", "its path has 108 bytes, and that of a Unix socket at most 107"),
    ],
)  # fmt: skip
def test_a_path_that_is_none_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_http(text)


def test_the_longest_path_is_one_of_the_kernels(folder: Path) -> None:
    path = f"{folder}/".ljust(SOCKET_PATH_MOST, "x")
    address = parse_http(f"unix:{path}")
    with listen(address, keys=False):
        assert takes_connections(address)


@pytest.mark.parametrize("umask", [0o077, 0])
@pytest.mark.parametrize(("keys", "mode"), [(False, 0o600), (True, 0o666)])
def test_without_a_key_the_file_is_its_users_alone(folder: Path, keys: bool, mode: int, umask: int) -> None:
    address, before = parse_http(f"unix:{folder}/a"), os.umask(umask)
    try:
        with listen(address, keys=keys):
            assert stat.S_IMODE((folder / "a").stat().st_mode) == mode
    finally:
        assert os.umask(before) == umask, "other files have the mode that they had"


def test_a_link_in_place_of_the_file_changes_no_other_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may write to the folder replaces the file as soon as it is there."""
    private = folder / "private"
    private.touch(0o600)

    class Replaced(socket.socket):
        @override
        def bind(self, address: Any, /) -> None:
            super().bind(address)
            Path(address).unlink()
            Path(address).symlink_to(private)

    monkeypatch.setattr(socket, "socket", Replaced)
    listen(parse_http(f"unix:{folder}/a"), keys=True).close()
    assert (folder / "a").is_symlink() and stat.S_IMODE(private.stat().st_mode) == 0o600


def test_a_file_that_a_killed_process_left_is_replaced(folder: Path) -> None:
    address = parse_http(f"unix:{folder}/a")
    for _ in range(2):
        listen(address, keys=False).close()  # Its file stays.
        assert not takes_connections(address) and (folder / "a").is_socket()
    remove_socket(address.path)
    assert not (folder / "a").exists()
    remove_socket(address.path)


def test_neither_a_socket_that_is_served_nor_another_file_is_removed(folder: Path) -> None:
    address = parse_http(f"unix:{folder}/a")
    with listen(address, keys=False):
        for refused in (lambda: remove_socket(address.path), lambda: listen(address, keys=False)):
            with pytest.raises(OSError, match="a process listens there"):
                refused()
        assert takes_connections(address)
    (folder / "b").write_text("kept")
    (folder / "c").symlink_to(folder / "a")
    for name in ("b", "c"):
        with pytest.raises(OSError, match="it is a file, and no socket"):
            listen(parse_http(f"unix:{folder}/{name}"), keys=False)
    assert (folder / "b").read_text() == "kept" and (folder / "c").is_symlink()


def test_a_socket_whose_backlog_is_full_is_served(folder: Path) -> None:
    address = parse_http(f"unix:{folder}/a")
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as clients:
        server.bind(address.path)
        server.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(3):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(address.path)
        assert takes_connections(address)
        with pytest.raises(OSError, match="a process listens there"):
            remove_socket(address.path)


def test_one_engine_holds_a_path(folder: Path) -> None:
    (folder / "linked").symlink_to(folder)
    with http_port.reserve(parse_http(f"unix:{folder}/a")):
        assert list(folder.iterdir()) == [folder / "linked"], "the HTTP process makes the file"
        with pytest.raises(OSError, match="in use"):
            hold_socket(f"{folder}/linked/a")
        hold_socket(f"{folder}/b").close()
        with socket.socket(socket.AF_UNIX) as bound:  # As that of its HTTP process, a moment before it listens.
            bound.bind(f"{folder}/a")
            with pytest.raises(OSError, match="in use"):
                hold_socket(f"{folder}/a")
            assert (folder / "a").is_socket(), "the file is the other engine's"
    hold_socket(f"{folder}/a").close()
    assert not (folder / "a").exists()
    with pytest.raises(OSError, match="there is no folder"):
        hold_socket(f"{folder}/none/a")


def test_a_socket_is_of_one_process(folder: Path) -> None:
    http = HttpConfig(listen=f"unix:{folder}/a")
    profile = Profile(name="x", model=ModelConfig(path="/x"), http=http)
    http_port.check_http(profile)
    with http_port.reserve(parse_http(f"unix:{folder}/a")) as held:
        assert http_port.with_port(profile, held) is profile
    with pytest.raises(ConfigError, match=r"http\.processes is 2, and http\.listen a Unix socket"):
        http_port.check_http(msgspec.structs.replace(profile, http=msgspec.structs.replace(http, processes=2)))
    ApiKeys({}, {}).check(parse_http(f"unix:{folder}/a"))


@pytest.mark.parametrize(("listen_at", "status"), [("127.0.0.1:80", 403), ("unix:/run/a", 200)])
async def test_a_proxy_passes_names_of_its_own(listen_at: str, status: int) -> None:
    """No page of a browser reaches a Unix socket, so its callers need not name this host."""
    async with HttpWorld(HttpConfig(listen=listen_at)) as world:
        answer = await world.http.get("/v1/models", headers={"host": "models.example.com"})
        assert answer.status_code == status, answer.text


def test_takes_connections_is_false_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = parse_http(f"127.0.0.1:{server.getsockname()[1]}")
        assert takes_connections(address)
    assert not takes_connections(address)
