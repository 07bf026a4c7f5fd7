"""aiperf: `python tests/clients/aiperf_run.py http://HOST:PORT`. Its command measures chats and completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import run

MODEL = Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny"
REQUESTS, TOKENS = 8, 12


def measured(url: str, kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "profile", "--model", "tiny", "--url", url, "--endpoint-type", kind, "--streaming",
            "--tokenizer", str(MODEL), "--request-count", str(REQUESTS), "--concurrency", "2",
            "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", str(TOKENS),
            "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", folder,
        ]  # fmt: skip
        command = [str(Path(sys.executable).parent / "aiperf"), *words]
        subprocess.run(command, check=True, timeout=200, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS and not found["error_summary"], found["error_summary"]
    assert found["usage_completion_tokens"]["avg"] == TOKENS, found["usage_completion_tokens"]
    return f"TTFT {found['time_to_first_token']['p50']:.1f} ms"


def chats(url: str) -> str:
    return measured(url, "chat")


def completions(url: str) -> str:
    return measured(url, "completions")


if __name__ == "__main__":
    run("aiperf", [chats, completions])
