"""From the kind of a backend in a profile to its class: built in, or of an installed package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from ppengine.store.backend import Backend, BackendError

GROUP = "ppconsole.backends"
"""Entry points of packages that bring a backend: its kind and its class."""
_BUILT_IN = {
    "memory": ("ppengine.store.backends.memory_backend", "MemoryBackend", "", ""),
    "files": ("ppengine.store.backends.files_backend", "FilesBackend", "", ""),
    "valkey": ("ppengine.store.backends.valkey_backend", "ValkeyBackend", "valkey", "redis"),
    "s3": ("ppengine.store.backends.s3_backend", "S3Backend", "s3", "obstore"),
}
"""Module, class, and the extra that it needs with its package."""


def known_kinds() -> dict[str, str]:
    """Return all kinds, each with the reason why it cannot be made, or an empty text. Nothing is imported."""
    lacks = {
        kind: _needs(extra, f"there is no {package}") if package and find_spec(package) is None else ""
        for kind, (_, _, extra, package) in _BUILT_IN.items()
    }
    others = sorted(point.name for point in entry_points(group=GROUP) if point.name not in lacks)
    return lacks | dict.fromkeys(others, "")


def make_backend(kind: str) -> Backend:
    """Return a backend that is not open yet. Raises BackendError for a kind that is not there."""
    made = _class_of(kind)()
    if not isinstance(made, Backend):
        raise BackendError(f"the entry point {kind} of {GROUP} makes {type(made).__name__}, which is no Backend")
    return made


def _class_of(kind: str) -> Callable[[], object]:
    if kind in _BUILT_IN:
        module, name, extra, _ = _BUILT_IN[kind]
        try:
            found: Callable[[], object] = getattr(import_module(module), name)
        except ImportError as error:
            raise BackendError(f"{kind} {_needs(extra, str(error))}") from None
        return found
    points = entry_points(group=GROUP)
    for point in points:
        if point.name == kind:
            loaded: Callable[[], object] = point.load()
            return loaded
    known = ", ".join([*_BUILT_IN, *sorted(point.name for point in points)])
    raise BackendError(f"there is no backend of kind {kind}; there are {known}")


def _needs(extra: str, why: str) -> str:
    return f"needs a package: pip install 'ppconsole[{extra}]' ({why})"
