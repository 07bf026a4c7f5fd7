"""The sockets of the process of texts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig, ModelConfig, Profile, profiles_dir
from ppengine.protocol.frames import MAX_FRAME_BYTES, Codec, encode
from ppengine.protocol.offline import Follow, News, Piece, ToFront
from ppengine.texts.__main__ import Loop

TINY = profiles_dir() / "models" / "tiny"


def test_the_tokens_of_all_requests_may_come_in_one_message(tmp_path: Path) -> None:
    """So they come to a process that follows another one, or has missed an answer."""
    config = EngineConfig(
        id="e", name="t", epoch="epoch", profile=Profile(name="t", model=ModelConfig(path=str(TINY))),
        model_path=str(TINY), model_type="opt", layers=[(0, 1)], max_model_len=1024, run_dir=str(tmp_path),
        ring_dir="/d", started_wall=0.0,
    )  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front:
        front.setsockopt(zmq.LINGER, 0)
        front.bind(config.endpoint("front"))
        loop = Loop(config, "texts", Tokenizer.load(TINY), [0])
        try:
            loop._stops.turn()
            assert front.poll(10_000)
            name, body = front.recv_multipart()
            question = Codec(ToFront).decode(body)
            assert isinstance(question, Follow)
            tokens = [2000] * (MAX_FRAME_BYTES // 3 + 1)
            news: msgspec.Struct = News(
                nonce=question.nonce, cursor=9, pieces=[Piece("r-1", 0, 0, tokens, [], "length")]
            )
            payload = encode(news)
            assert len(payload) > MAX_FRAME_BYTES
            front.send_multipart([name, payload])
            assert loop._front.poll(10_000), "it arrives"
            loop._on_front()
            assert loop._stops._cursor == 9
        finally:
            loop._context.destroy(0)
