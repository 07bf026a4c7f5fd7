"""aider: `python tests/clients/aider_run.py http://HOST:PORT`. It asks one question about a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import run, until_idle


def question(url: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text("print(1)\n")
        words = [
            "--model", "openai/tiny", "--edit-format", "ask", "--message", "Say a word.", "--no-git",
            "--map-tokens", "0", "--no-show-model-warnings", "--no-check-update", "--yes-always", "--no-pretty",
            "hello.py",
        ]  # fmt: skip
        command = [str(Path(sys.executable).parent / "aider"), *words]
        env = {**os.environ, "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none", "HOME": folder}
        ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=True)
    until_idle(url)
    (tokens,) = (line for line in ran.stdout.splitlines() if line.startswith("Tokens: "))
    assert " 0 received" not in tokens and "rror:" not in ran.stdout, ran.stdout
    return tokens


if __name__ == "__main__":
    run("aider", [question])
