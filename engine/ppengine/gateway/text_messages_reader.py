"""Messages of the process of texts, for the desks of commands and questions."""

from __future__ import annotations

from collections.abc import Callable

from ppengine.gateway.bulk import BulkDesk
from ppengine.gateway.gateway_sockets import Socket, drain
from ppengine.gateway.text_desk import TextDesk
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Fetched, Inspected
from ppengine.protocol.text_messages import Encoded, FromTexts, TextsAlive, TextsEvent


class TextMessagesReader:
    """Reads the socket `texts`."""

    def __init__(
        self, socket: Socket, commands: TextDesk, questions: BulkDesk, event: Callable[[str, str], object],
        alive: Callable[[], None], refused: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`event` takes kind and text of an event, `refused` why a message is dropped; `alive` hears signs of life."""
        self._socket, self._commands, self._questions = socket, commands, questions
        self._event, self._alive, self._refused = event, alive, refused
        self._codec = frames.Codec(FromTexts)

    def read(self) -> None:
        """Take the waiting messages."""
        for parts in drain(self._socket):
            try:
                message = self._codec.decode(frames.split(parts, 2)[1])
            except frames.ProtocolError as error:
                self._refused(f"a message of the process of texts is dropped: {error}")
                continue
            if isinstance(message, Encoded):
                self._commands.take(message)
            elif isinstance(message, TextsAlive):
                self._alive()
                if self._commands.alive(message.pid):
                    self._questions.texts_back()
            elif isinstance(message, TextsEvent):
                self._event(message.kind, message.text)
            elif isinstance(message, Fetched | Inspected | Failed):
                self._questions.on_answer(message)
