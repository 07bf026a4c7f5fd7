"""File names of the engine: people go to a file by its name, so each occurs once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import ppengine


def test_no_file_name_of_the_engine_occurs_twice() -> None:
    folder = Path(ppengine.__path__[0])
    names = Counter(path.name for path in folder.rglob("*.py") if not path.name.startswith("__"))
    assert len(names) > 300, "the files are found"
    assert [name for name, times in names.items() if times > 1] == []
