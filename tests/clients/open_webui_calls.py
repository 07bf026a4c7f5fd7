"""The calls that Open WebUI's backend makes: `python tests/clients/open_webui_calls.py http://HOST:PORT`."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from checks import PROMPT, run, until_idle

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}
TITLE = '### Task:\nGenerate a concise title for the chat history.\n### Output:\nJSON format: {"title": "x"}'


def sent(url: str, method: str, path: str, body: Any = None) -> HTTPResponse:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=30)
    connection.request(method, f"/v1{path}", None if body is None else json.dumps(body), HEADERS)
    return connection.getresponse()


def models(url: str) -> str:
    answer = json.loads(sent(url, "GET", "/models").read())
    assert answer["object"] == "list" and answer["data"][0]["object"] == "model"
    return answer["data"][0]["id"]


def stream(url: str) -> str:
    body = {
        "stream": True, "model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = sent(url, "POST", "/chat/completions", body)
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    lines = [line for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["usage"]["completion_tokens"] <= 16
    return f"{len(lines)} events"


def title(url: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "max_completion_tokens": 20,
    }
    assert json.loads(sent(url, "POST", "/chat/completions", body).read())["choices"][0]["message"]["content"]


def an_error_is_shown(url: str) -> str:
    answer = sent(url, "POST", "/chat/completions", {"model": "gone", "messages": []})
    assert answer.status == 404
    return json.loads(answer.read())["error"]["message"]


def cancel(url: str) -> None:
    body = {"stream": True, "model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 900}
    answer = sent(url, "POST", "/chat/completions", {**body, "ignore_eos": True})
    answer.readline()
    answer.close()
    until_idle(url)


if __name__ == "__main__":
    run("open-webui", [models, stream, title, an_error_is_shown, cancel])
