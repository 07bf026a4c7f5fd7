"""Edges from card to card, between two processes: exact bytes, order without a host, releases, and nothing left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real import needs_gpu

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine")]
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
pytest.importorskip("msgspec", reason="needs the engine's packages")

from ppengine.protocol.steps import Retired  # noqa: E402
from ppengine.stage.backends.cuda.device_buffers import LANDING_SLOTS, Landing  # noqa: E402
from ppengine.stage.backends.cuda.device_edges import DeviceReceiver  # noqa: E402
from ppengine.stage.backends.cuda.device_ends import CudaEnds  # noqa: E402
from ppengine.stage.backends.cuda.driver_api import Driver  # noqa: E402
from ppengine.stage.backends.cuda.message_sums import MessageSums  # noqa: E402
from ppengine.stage.backends.cuda.streams import Stream  # noqa: E402
from ppengine.stage.checks import StageChecks  # noqa: E402
from ppengine.stage.edge import Edge  # noqa: E402
from ppengine.stage.edge_addresses import FolderBook  # noqa: E402
from ppengine.stage.edge_flags import EdgeFlags, Flag  # noqa: E402
from ppengine.stage.edge_offers import Offer, RefusedError, consider, propose  # noqa: E402
from ppengine.stage.generations import Generations  # noqa: E402
from ppengine.stage.meeting import meet  # noqa: E402
from ppengine.stage.pending_step import Pending  # noqa: E402
from ppengine.stage.recorder import Recorder  # noqa: E402
from ppengine.stage.wire import PeerLostError  # noqa: E402

pytestmark = needs_gpu
TOKENS, WIDTH, SLOTS = 64, 512, LANDING_SLOTS
SIZES = (1, 64, 7, 33, 64, 2, 64, 64, 5)
SPIN = 400_000_000
"""Clock ticks of a kernel that keeps a stream busy for about 0.2 s."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like that of the rings: the driver registers pages of no other file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def hidden(step: int) -> torch.Tensor:
    """The same on both sides: [tokens, WIDTH]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SIZES[step - 1], WIDTH, generator=generator)


def make_card(driver: Driver) -> Any:
    uuid, compute = f"GPU-{torch.cuda.get_device_properties(driver.device).uuid}", Stream("compute", driver.device)
    landing = Landing(driver, uuid, compute, TOKENS, WIDTH, torch.float32)
    sums = MessageSums(compute, driver.device)
    # A kernel's first launch waits for the device.
    sums.warm_up(landing.incoming[:1])
    compute.synchronize()
    return SimpleNamespace(uuid=uuid, device=driver.device, compute=compute, landing=landing, sums=sums)


def send(folder: Path, mode: str) -> None:
    """Play stage 0: launch all messages at once, then do what `mode` says."""
    driver = Driver(0)
    card: Any = make_card(driver)
    edge = Edge(meet(FolderBook(folder, 1), "e0", True, 1, lambda: False), True)
    main, ends = Recorder(folder / "main.ring", "main", 0, 0), CudaEnds(driver, card)
    sender, refusal = consider(edge.wire, lambda offer: ends.sender(edge, folder / "e0.words", main, offer))
    assert sender is not None, refusal
    sent = [hidden(step).to(card.device) for step in range(1, len(SIZES) + 1)]
    torch.cuda.synchronize()
    with card.compute.use():
        if mode == "slow":
            torch.cuda._sleep(SPIN)
        for step in range(1, 3 if mode == "silent" else len(SIZES) + 1):
            sender.checksum = card.sums.make(sent[step - 1]) if mode == "summed" else 0
            sender.put(step, sent[step - 1])
        if mode == "silent":
            card.compute.synchronize()
            time.sleep(3600)
        if mode == "stuck":
            torch.cuda._sleep(1 << 50)
            sender._signals.write(Flag.FILLED, 99)
            time.sleep(3600)
    card.compute.synchronize()
    sender.close()


@contextlib.contextmanager
def receiving(folder: Path, mode: str) -> Iterator[tuple[DeviceReceiver, Any, subprocess.Popen[bytes]]]:
    """The receiving end, beside a process that sends; leaving it asserts that nothing of it is left."""
    process = subprocess.Popen([sys.executable, __file__, str(folder), mode])
    driver = Driver(0)
    card = make_card(driver)
    try:
        edge = Edge(meet(FolderBook(folder, 1), "e0", False, 0, lambda: process.poll() is not None), False)
        receiver = CudaEnds(driver, card).receiver(edge, folder / "e0.words")
        assert propose(edge.wire, receiver.offer) == ""
        yield receiver, card, process
        receiver.release()
        card.compute.synchronize()
        receiver.close()
        assert not list(folder.glob("*.words")) and ".words" not in Path("/proc/self/maps").read_text()
    finally:
        process.kill()
        process.wait()


def test_hidden_states_arrive_bit_for_bit(shared: Path) -> None:
    """More messages than slots, all launched by the sender before the first is taken."""
    with receiving(shared, "all") as (receiver, card, process):
        words, taken = EdgeFlags(shared / "e0.words", create=False), []
        time.sleep(0.5)
        assert words.value(Flag.FILLED) == SLOTS, "there is no room for more"
        for step, tokens in enumerate(SIZES, 1):
            receiver.expect(step, tokens)
        with card.compute.use():
            for step in range(1, len(SIZES) + 1):
                taken.append(receiver.take(step).clone())
        card.compute.synchronize()
        for step, found in enumerate(taken, 1):
            assert torch.equal(found.cpu(), hidden(step)), step
        assert [words.value(flag) for flag in Flag] == [len(SIZES)] * 2
        assert process.wait(20) == 0
        words.close()


@pytest.mark.parametrize("overwritten", [0, 2])
def test_the_first_message_that_is_overwritten_in_its_slot_is_a_finding(overwritten: int, shared: Path) -> None:
    with receiving(shared, "summed") as (receiver, card, process):
        words, checks, pendings = EdgeFlags(shared / "e0.words", create=False), StageChecks(1, 0, Generations(1)), []
        while words.value(Flag.FILLED) < SLOTS:
            time.sleep(0.01)
        if overwritten:
            card.landing.slots[overwritten % SLOTS].view(-1)[WIDTH + 3] += 1.0
        torch.cuda.synchronize()
        for step, tokens in enumerate(SIZES, 1):
            receiver.expect(step, tokens)
            pendings.append(Pending(Retired(1, step, 1, 0)))
            taken, buffer = receiver.take(step), card.landing.buffer
            card.sums.compare(receiver.edge, step, taken, buffer, checks, pendings[-1])
            assert len(pendings[-1]._ends) == 1, "it is compared"
            pendings[-1].until(card.compute.record("copied"))
        for pending in pendings:
            pending.finish()
        found = [finding.summary for news in checks.news() for finding in news.findings]  # type: ignore[union-attr]
        if overwritten:
            assert found == ["edge stage 0 -> stage 1: the hidden states of m2 changed on their way"]
        else:
            assert found == []
        assert process.wait(20) == 0
        words.close()


def test_no_host_waits_for_a_device(shared: Path) -> None:
    """The sender's device is busy: the receiver has launched its step long before the message is there."""
    with receiving(shared, "slow") as (receiver, card, _):
        receiver.expect(1, SIZES[0])
        with card.compute.use():
            found = receiver.take(1).clone()
        end = card.compute.record("taken")
        assert not end.done(), "the message cannot be there yet"
        end.synchronize()
        assert torch.equal(found.cpu(), hidden(1))


def test_a_wait_for_a_device_that_never_ends_is_released(shared: Path) -> None:
    """The sender's words come to nothing: the host lets the stream run on, and all can be closed."""
    with receiving(shared, "stuck") as (receiver, card, process):
        for step, tokens in enumerate(SIZES, 1):
            receiver.expect(step, tokens)
            receiver.take(step)
        card.compute.synchronize()
        receiver._signals.wait(Flag.FILLED, 99)
        end = card.compute.record("never")
        time.sleep(0.2)
        assert not end.done()
        receiver.edge.wire.check_open()
        process.kill()
        process.wait()
        with pytest.raises(PeerLostError, match="lost stage 0"):
            receiver.edge.wire.check_open()
        assert not end.done()
        receiver.release()
        end.synchronize()


def test_a_dead_sender_leaves_the_receivers_memory_whole(shared: Path) -> None:
    with receiving(shared, "silent") as (receiver, card, process):
        for step in (1, 2):
            receiver.expect(step, SIZES[step - 1])
        receiver.take(1)
        process.kill()
        process.wait()
        found = receiver.take(2)
        card.compute.synchronize()
        assert torch.equal(found.cpu(), hidden(2)), "what had come is there"


def test_a_dead_receiver_leaves_the_sender_alive(shared: Path) -> None:
    """The other way round: this process sends into memory whose owner is killed meanwhile, and its device goes on."""
    process = subprocess.Popen([sys.executable, __file__, str(shared), "receiver"])
    driver = Driver(0)
    card: Any = make_card(driver)
    try:
        edge = Edge(meet(FolderBook(shared, 1), "e0", True, 1, lambda: process.poll() is not None), True)
        main, ends = Recorder(shared / "main.ring", "main", 0, 0), CudaEnds(driver, card)
        sender, refusal = consider(edge.wire, lambda offer: ends.sender(edge, shared / "e0.words", main, offer))
        assert sender is not None, refusal
        with pytest.raises(ValueError, match=f"a message of {(TOKENS + 1) * WIDTH * 4} bytes"):
            sender.put(1, torch.zeros(TOKENS + 1, WIDTH, device=card.device))
        sent = [hidden(step).to(card.device) for step in range(1, SLOTS + 2)]
        # Loaded here: a kernel's first launch waits for the device, and this one is to wait for a peer.
        assert (torch.ones(4, device=card.device) * 3).sum().item() == 12
        torch.cuda.synchronize()
        with card.compute.use():
            for step, tensor in enumerate(sent, 1):  # the last one waits for a receiver that takes nothing
                sender.put(step, tensor)
            after = torch.ones(4, device=card.device) * 3
        process.kill()
        process.wait()
        end = card.compute.record("sent")
        time.sleep(0.5)
        assert not end.done()
        sender.release()
        end.synchronize()
        assert after.tolist() == [3.0] * 4
        with pytest.raises(PeerLostError):
            sender.put(SLOTS + 2, sent[0])
        sender.close()
    finally:
        process.kill()
        process.wait()
    (shared / "e0.words").unlink()  # its owner was killed
    assert ".words" not in Path("/proc/self/maps").read_text()
    assert torch.zeros(8, device=card.device).sum().item() == 0


def test_a_handle_that_is_none_is_refused(shared: Path) -> None:
    driver = Driver(0)
    card: Any = make_card(driver)
    ends, edge = CudaEnds(driver, card), Edge.__new__(Edge)
    main = Recorder(shared / "main.ring", "main", 0, 0)
    with pytest.raises(RefusedError, match="does not reach memory of GPU-x: cuIpcOpenMemHandle"):
        ends.sender(edge, shared / "e0.words", main, Offer("GPU-x", os.urandom(64), 8))
    assert torch.ones(4, device=card.device).sum().item() == 4, "the context is as it was"


def play_receiver(folder: Path) -> None:
    """Play stage 1: offer memory, take nothing."""
    driver = Driver(0)
    card: Any = make_card(driver)
    edge = Edge(meet(FolderBook(folder, 1), "e0", False, 0, lambda: False), False)
    receiver = CudaEnds(driver, card).receiver(edge, folder / "e0.words")
    assert propose(edge.wire, receiver.offer) == ""
    time.sleep(3600)


if __name__ == "__main__":
    if sys.argv[2] == "receiver":
        play_receiver(Path(sys.argv[1]))
    else:
        send(Path(sys.argv[1]), sys.argv[2])
