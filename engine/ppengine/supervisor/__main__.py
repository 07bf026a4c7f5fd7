"""Entry point: `python -m ppengine.supervisor PROFILE [--set a.b=c]... [--name NAME] [--allow-faults]
[--within S] [--kept]`,
or `--resume ID --after CODE` behind one that was killed.

On stdout one JSON line when the engine can be attached to, `{"event": "started", "id", "name", "run_dir"}`, and one at
the end, `{"event": "stopped", "code", "reason"}`; messages for humans on stderr. Exit codes: 0 stopped as asked,
1 error, 2 usage or profile, 5 did not serve in time, 8 does not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ppengine.checkpoint.model_spec import CheckpointError
from ppengine.common import lifeline
from ppengine.common.config import ConfigError, Profile, load_profile
from ppengine.common.http_address import parse_http
from ppengine.common.open_files import raise_limit
from ppengine.common.socket_files import remove_socket
from ppengine.hub.fetch import fetch_model
from ppengine.hub.transfer import Stopped
from ppengine.protocol.discovery import RuntimeDirError
from ppengine.protocol.error_text import PREFIX, one_line
from ppengine.supervisor.announcements import announce, tell
from ppengine.supervisor.boot import engine_config, parse_profile
from ppengine.supervisor.claims import ClaimError, identity
from ppengine.supervisor.http_port import reserve, with_port
from ppengine.supervisor.launch.launcher import Executor, ExecutorError
from ppengine.supervisor.launch.local import LocalExecutor
from ppengine.supervisor.resume import resume
from ppengine.supervisor.supervise import End, Supervisor
from ppengine.supervisor.wakeup import Wakeup


def main() -> int:
    """Run one engine and return its exit code."""
    options = _parser().parse_args()
    os.umask(0o077)
    raise_limit()
    wakeup = Wakeup()
    wakeup.install()
    lifeline.adopt(options.lifeline, on_close=lambda: wakeup.ask("its program has ended or closed it"))
    try:
        end = _run(options, wakeup)
    except (CheckpointError, ClaimError, ExecutorError, RuntimeDirError) as error:
        end = End(1, str(error))
    except ConfigError as error:
        end = End(2, str(error))
    reason = one_line(end.reason)
    tell(f"{PREFIX}{reason}" if end.code else f"stopped: {reason}")
    announce("stopped", code=end.code, reason=reason)
    return end.code


def _run(options: argparse.Namespace, wakeup: Wakeup) -> End:
    if options.resume is not None:
        config, before = resume(options.resume, options.after, options.killed)
        with _held_port(config.profile):
            return Supervisor(config, _executor(config.profile), wakeup, follows=before).run()
    profile = _profile(options)
    try:
        fetch_model(profile.model, tell, lambda: bool(wakeup.asked))
    except Stopped:
        return End(0, wakeup.asked)
    keeper = identity(os.getppid()) if options.kept else None
    if keeper is not None and profile.parallel.executor != "local":
        raise ConfigError(f"--restart needs stages of this host: parallel.executor is {profile.parallel.executor}")
    with _held_port(profile) as profile:
        config = engine_config(profile, options.name, allow_faults=options.allow_faults, keeper=keeper)
        return Supervisor(config, _executor(profile), wakeup, within_s=options.within).run()


@contextlib.contextmanager
def _held_port(profile: Profile) -> Iterator[Profile]:
    """Hold the address of the API, if there is one; yields the profile with its port. Raises ConfigError."""
    if profile.http.listen is None:
        yield profile
        return
    address = parse_http(profile.http.listen)
    try:
        held = reserve(address)
    except OSError as error:
        raise ConfigError(f"http.listen: {profile.http.listen} cannot be used: {error.strerror}") from None
    with held:
        try:
            yield with_port(profile, held)
        finally:
            if address.path:
                with contextlib.suppress(OSError):
                    remove_socket(address.path)


def _profile(options: argparse.Namespace) -> Profile:
    if (options.profile is None) == (options.profile_json is None):
        raise ConfigError("give a PROFILE or --profile-json, one of them")
    if options.profile_json is None:
        return load_profile(options.profile, options.set)
    if options.set:
        raise ConfigError("--set belongs to a PROFILE; --profile-json says all by itself")
    try:
        return parse_profile(options.profile_json.read_bytes())
    except OSError as error:
        raise ConfigError(f"--profile-json: {options.profile_json}: {error.strerror}") from None


def _executor(profile: Profile) -> Executor:
    """Return the profile's executor; Ray is imported only where it is asked for."""
    if profile.parallel.executor == "ray":
        from ppengine.supervisor.launch.ray_launcher import RayExecutor

        return RayExecutor()
    return LocalExecutor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ppengine.supervisor", description="Run one engine and all its processes.")
    parser.add_argument("profile", nargs="?", metavar="PROFILE", help="a bundled name or a .yaml file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one key of the profile")
    parser.add_argument("--name", help="name of the engine; without it, the profile's")
    parser.add_argument("--allow-faults", action="store_true", help="let operators break it on demand: for drills")
    parser.add_argument("--within", type=float, metavar="S", help="end it if it does not serve within S seconds")
    parser.add_argument("--profile-json", type=Path, metavar="FILE", help="a profile as JSON, for PROFILE")
    parser.add_argument("--kept", action="store_true", help="its parent starts another one if this one is killed")
    parser.add_argument("--resume", metavar="ID", help="go on with the engine of a supervisor that was killed")
    parser.add_argument("--after", type=int, default=-9, metavar="CODE", help="its exit code, below 0 for a signal")
    parser.add_argument("--killed", default="", metavar="TEXT", help="how it was killed, as its parent has seen it")
    lifeline.add_argument(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
