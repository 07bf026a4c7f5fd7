"""Folders of downloaded models.

$XDG_CACHE_HOME/ppconsole/models/<source>/<revision>/ORG/NAME/    (or ~/.cache/... where the variable is not set)
"""

from __future__ import annotations

import os
from pathlib import Path

REVISIONS = {"huggingface": "main", "modelscope": "master"}
"""Sources that are hubs, with the revision that is taken where a profile has none."""


def model_folder(source: str, name: str, revision: str | None) -> Path:
    """Return the folder of the model `name`, as ORG/NAME, of a hub; it may be missing.

    Two revisions of a model have two folders: one that is complete is never changed.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return cache / "ppconsole" / "models" / source / (revision or REVISIONS[source]) / name
