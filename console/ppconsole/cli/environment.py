"""The environment variables that ppconsole reads: the one list, for the help and the reference."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """One variable. `meaning` is one line without its full stop."""

    name: str
    meaning: str


VARIABLES = (
    Variable("PPCONSOLE_ENGINE", "Id, id prefix or name of the engine, where -e is not given"),
    Variable("PPCONSOLE_THEME", "Colours of the console: dark, light, or terminal (its own 16)"),
    Variable("PPCONSOLE_MOUSE", "1: the console takes the mouse; otherwise the terminal selects text with it"),
    Variable("PPCONSOLE_AUDIT_DIR", "Folder in which an engine keeps its audit log when it has ended"),
    Variable("PPCONSOLE_API_KEY", "API key of the HTTP port, beside those of the file http.keys"),
    Variable("PPCONSOLE_RDMA_TRANSPORTS", "Transports of UCX for RDMA, `ib` by default; `tcp` for tests alone"),
    Variable("NOTIFY_SOCKET", "Socket of a service manager: `serve` says there when it serves, and that it lives"),
    Variable("NO_COLOR", "Set: no colours; bold, dim and reverse remain"),
    Variable("XDG_RUNTIME_DIR", "Its folder ppconsole/ has the engines that run; /tmp/ppconsole-UID if not set"),
    Variable("XDG_CONFIG_HOME", "Its folder ppconsole/ has config.toml, keys and contexts; ~/.config if not set"),
    Variable("XDG_CACHE_HOME", "Its folder ppconsole/models/ keeps models of hubs; ~/.cache if not set"),
    Variable("HF_TOKEN", "Token for models of Hugging Face that need one; sent to that hub alone"),
    Variable("HF_ENDPOINT", "Address of a mirror of Hugging Face"),
    Variable("MODELSCOPE_ENDPOINT", "Address of a mirror of ModelScope"),
    Variable("XDG_STATE_HOME", "Its folder ppconsole/ keeps options of prompts and panels; ~/.local/state if not set"),
)
