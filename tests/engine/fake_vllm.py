"""A package `vllm` for processes that a test starts: as much of the real one as the driver uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FAKE = '''
"""The part of vLLM that the driver uses."""
import json, os, subprocess, sys
from types import SimpleNamespace

__version__ = "0.0.fake"
print("vLLM talks on stdout")


class SamplingParams:
    def __init__(self, *, temperature, top_p, max_tokens, ignore_eos, detokenize, seed=None, top_k=-1):
        assert ignore_eos and not detokenize
        self.max_tokens, self.said = max_tokens, [temperature, top_p, top_k, seed]


class LLM:
    def __init__(self, model, tensor_parallel_size, pipeline_parallel_size, dtype, load_format, max_model_len,
                 skip_tokenizer_init=False, worker_extension_cls=""):
        if model.endswith("broken"):
            raise RuntimeError("no such model")
        self.said = [model, tensor_parallel_size, pipeline_parallel_size, dtype, load_format, max_model_len]
        self.extension = worker_extension_cls
        os.write(1, b"so do its processes\\n")

    def collective_rpc(self, method, args):
        """The real one's workers are processes: they find the extension by their environment."""
        module, name = self.extension.split(".")
        code = f"import {module}; {module}.{name}.{method}; assert {args} == ({args[0]},)"
        subprocess.run([sys.executable, "-c", code], check=True)
        self.said.append([method, *args])

    def generate(self, prompts, params, use_tqdm=True):
        assert not use_tqdm and all(list(prompt) == ["prompt_token_ids"] for prompt in prompts)
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps([self.said, [len(p["prompt_token_ids"]) for p in prompts], params[-1].said]) + "\\n")
        short = os.environ.get("FAKE_SHORT", "")
        counts = [1 if short else each.max_tokens for each in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * count)]) for count in counts]
'''

SERVE = '''
"""`vllm serve`: as much of it as the online bench uses. It answers each token with 7, at once."""
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
print("vLLM talks on stdout")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = {"/health": {}, "/v1/models": {"data": [{"id": "fake"}]}, "/version": {"version": "0.0.fake"}}
        self._send(200, json.dumps(known[self.path]).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "fake" and body["stream"] and body["ignore_eos"], body
        events = [{"choices": [{"index": 0, "text": "x"}]}] * body["max_tokens"]
        events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        data = "".join("data: " + json.dumps(one) + "\\n\\n" for one in events) + "data: [DONE]\\n\\n"
        self._send(200, data.encode())

    def _send(self, status, data):
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 100


Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package on the path of child processes; its calls are written to `folder / "calls"`."""
    package = folder / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    cli = package / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text(SERVE)
    before = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), *before]))
    monkeypatch.setenv("FAKE_LOG", str(folder / "calls"))
