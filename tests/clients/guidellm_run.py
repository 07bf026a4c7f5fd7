"""guidellm: `python tests/clients/guidellm_run.py http://HOST:PORT`. Its command measures chats and completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import run

MODEL = Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny"
REQUESTS, TOKENS = 4, 12


def measured(url: str, path: str, profile: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [
            "--backend", f"kind=openai_http,target={url},request_format={path}", "--profile", profile,
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
            "--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={TOKENS}",
            "--disable-console", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        command = [str(Path(sys.executable).parent / "guidellm"), "run", *words]
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS and not totals["errored"], totals
    tokens = found["metrics"]["output_token_count"]["successful"]
    assert tokens["mean"] == TOKENS, tokens
    ttft = found["metrics"]["time_to_first_token_ms"]["successful"]["median"]
    return f"TTFT {ttft:.1f} ms"


def chats(url: str) -> str:
    return measured(url, "/v1/chat/completions", "kind=synchronous")


def completions(url: str) -> str:
    return measured(url, "/v1/completions", "kind=synchronous")


if __name__ == "__main__":
    run("guidellm", [chats, completions])
