"""`key`: keys of this user, and those that may attach to this user's engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from ppconsole.cli import exits
from ppconsole.cli.options import json_option
from ppconsole.cli.session import print_json, say


@click.group("key")
def key_command() -> None:
    """Let other keys attach to the engines of this user.

    Engines that run see a change at once. The user's own consoles need no step.
    """


@contextmanager
def _checked() -> Iterator[None]:
    """Turn an error of a file or a key into a Failure."""
    from ppengine.protocol.keys import KeyFileError

    try:
        yield
    except KeyFileError as error:
        raise exits.Failure(str(error)) from None


@key_command.command("new")
@click.option("--replace", is_flag=True, help="Make another one; the present key stops at once.")
def new_command(replace: bool) -> None:
    """Print the public key of this user's consoles, made if there is none.

    The owner of an engine allows it with `ppconsole key allow`.
    """
    from ppengine.protocol.keys import keys_dir, write_keypair

    from ppconsole.link.keypair import client_keypair, make_keypair

    with _checked():
        if replace:
            write_keypair(keys_dir() / "client.key", make_keypair())
        click.echo(client_keypair().public)


@key_command.command("allow")
@click.argument("name")
@click.argument("key")
@click.option(
    "--role", type=click.Choice(["viewer", "operator", "admin"]), default="viewer", show_default=True,
    help="Watch; also submit and operate; also stop the engine and break it on purpose.",
)  # fmt: skip
def allow_command(name: str, key: str, role: str) -> None:
    """Let KEY attach to this user's engines; NAME is written beside its commands in the audit log."""
    from ppengine.protocol.allowed_keys import ROLES, AllowedKey, allow, allowed_path, check_name
    from ppengine.protocol.keys import check_key

    with _checked():
        chosen = next(one for one in ROLES if one == role)
        allow(allowed_path(), AllowedKey(chosen, check_key(key), check_name(name)))


@key_command.command("revoke")
@click.argument("name")
def revoke_command(name: str) -> None:
    """End the access of a key; its live consoles are cut off within a second."""
    from ppengine.protocol.allowed_keys import allowed_path, revoke

    with _checked():
        gone = revoke(allowed_path(), name)
    say(f"revoked {gone.role} {gone.name}")


@key_command.command("ls")
@json_option()
def list_command(as_json: bool) -> None:
    """List this user's public keys, and those that are allowed.

    `server` is the key that consoles on other hosts pin. Exit code 1: a line of the file is wrong and has no effect.
    """
    from ppengine.protocol.allowed_keys import allowed_path, read_allowed
    from ppengine.protocol.keys import own_keypair

    from ppconsole.link.keypair import client_keypair, make_keypair

    with _checked():
        client, server = client_keypair().public, own_keypair("server", make_keypair).public
        keys, problems = read_allowed(allowed_path())
    if as_json:
        print_json({"client": client, "server": server, "allowed": [one._asdict() for one in keys]})
    else:
        for what, key in (("client", client), ("server", server)):
            click.echo(f"{what:<10}{key}")
        for one in keys:
            click.echo(f"{one.role:<10}{one.key}  {one.name}")
    if problems:
        raise exits.Failure(f"{allowed_path()}: {'; '.join(problems)}")
