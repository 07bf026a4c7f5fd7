"""Running streams, and texts of 100,000 tokens: the load of `bench_long_prompt`."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import socket
import threading
import time
from pathlib import Path

from ppengine.checkpoint.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "profiles" / "models" / "tiny"
LONGEST = 131_072


def long_model(folder: Path) -> Path:
    """Return a copy of the bundled model that takes prompts of 131,072 tokens."""
    made = folder / "long"
    shutil.copytree(TINY, made)
    config = json.loads((made / "config.json").read_text()) | {"max_position_embeddings": LONGEST}
    (made / "config.json").write_text(json.dumps(config))
    return made


class Texts:
    """Texts of random words, of about `count` tokens and no less; each begins in another way."""

    def __init__(self, tokenizer: Tokenizer, count: int, seed: int = 1) -> None:
        source, self._number = random.Random(seed), itertools.count()
        found = {tokenizer.token_text(token).strip() for token in range(256, 20_000)}
        words = sorted(word for word in found if word.isascii() and word.isalpha())
        sample = " ".join(source.choices(words, k=5_000))
        self._body = " ".join(source.choices(words, k=5_000 * count // len(tokenizer.encode(sample))))
        self.tokens = len(tokenizer.encode(self._body))
        while self.tokens < count:
            self._body += " " + " ".join(source.choices(words, k=count - self.tokens))
            self.tokens = len(tokenizer.encode(self._body))

    @property
    def characters(self) -> int:
        """Characters of a text, without its beginning."""
        return len(self._body)

    def next(self) -> str:
        """Return a text whose first block no other has, so that nothing of it is cached."""
        return f"Number {next(self._number)}: {self._body}"


def http_request(fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body), body,
    )  # fmt: skip


class Streams:
    """Streams that begin again at their ends, and the gaps between their tokens."""

    def __init__(self, address: tuple[str, int], count: int, output: int) -> None:
        self._address, self._output, self.ended = address, output, False
        self._gaps: list[float] = []
        self._lock = threading.Lock()
        for number in range(count):
            threading.Thread(target=self._follow, args=(number,), daemon=True).start()

    def _follow(self, number: int) -> None:
        fields: dict[str, object] = {
            "prompt": f"Once {number}", "stream": True, "max_tokens": self._output, "ignore_eos": True,
        }  # fmt: skip
        while not self.ended:
            with contextlib.suppress(OSError), socket.create_connection(self._address) as sock:
                sock.sendall(http_request(fields))
                last = 0.0
                while not self.ended and (data := sock.recv(1 << 16)):
                    now = time.monotonic()
                    if b"data: {" in data:
                        if last:
                            with self._lock:
                                self._gaps.append(now - last)
                        last = now

    def take(self) -> list[float]:
        """Return the gaps since the last call, in ms, in order of length."""
        with self._lock:
            gaps, self._gaps = self._gaps, []
        return sorted(1e3 * each for each in gaps)


def quantiles(values: list[float]) -> tuple[float, float]:
    """Return p50 and p99 of sorted values."""
    return values[(len(values) - 1) // 2], values[-(-99 * len(values) // 100) - 1]
