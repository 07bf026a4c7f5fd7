"""Links of cards, as an NVML reports them that has them all, some of them, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.agent import card_links
from ppengine.agent.card_links import CardLinks
from ppengine.protocol.gpu import GpuInfo, GpuPeer


class NvmlError(Exception):
    pass


class Nvml:
    """Three cards: 0 and 1 with four links to each other, one of them down; 2 without NVLink."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 6

    def __init__(self) -> None:
        self.asked = 0
        self.switched = False

    def nvmlDeviceGetPciInfo(self, card: int) -> Any:
        self.asked += 1
        return SimpleNamespace(busId=f"00000000:{0x1A + card:02X}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, card: int, link: int) -> int:
        if card == 2 or link >= 4:
            raise NvmlError
        return int(link != 3)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: int, link: int) -> Any:
        return SimpleNamespace(busId="0000:99:00.0" if self.switched else f"0000:{0x1B - card:02x}:00.0")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: int) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: int) -> int:
        return 16

    def nvmlDeviceGetP2PStatus(self, card: int, other: int, index: int) -> int:
        return 0 if 2 not in (card, other) or not index else 4

    def nvmlDeviceGetTopologyCommonAncestor(self, card: int, other: int) -> int:
        return 50 if 2 in (card, other) else 10


def links_of(nvml: Any, card: int) -> tuple[CardLinks, GpuInfo]:
    links = CardLinks(card)
    links.meet({f"GPU-{other}": other for other in range(3) if other != card})
    return links, GpuInfo(uuid=f"GPU-{card}", **links.read(nvml))


def test_the_links_of_a_card_are_read_and_one_that_is_down_is_missing() -> None:
    _, card = links_of(Nvml(), 0)
    assert (card.bus_id, card.nvlinks, card.nvlinks_active) == ("0000:1a:00.0", 4, 3)
    assert (card.pcie_generation, card.pcie_generation_most) == (1, 5)
    assert (card.pcie_width, card.pcie_width_most) == (16, None), "the module has no function for the most"
    assert card.peers == [
        GpuPeer(uuid="GPU-1", nvlink=True, links=3, reaches=True, path="one switch"),
        GpuPeer(uuid="GPU-2", nvlink=False, links=0, reaches=True, path="other NUMA node"),
    ]


def test_links_that_end_at_a_switch_go_to_no_card() -> None:
    nvml = Nvml()
    nvml.switched = True
    _, card = links_of(nvml, 0)
    assert card.peers is not None and (card.peers[0].nvlink, card.peers[0].links) == (True, 0)


def test_a_card_without_nvlink_has_the_rest() -> None:
    _, card = links_of(Nvml(), 2)
    assert (card.nvlinks, card.nvlinks_active) == (None, None)
    assert card.peers is not None and card.peers[0].links is None and card.peers[0].path == "other NUMA node"


def test_an_nvml_that_knows_none_of_it_leaves_everything_unknown() -> None:
    _, card = links_of(SimpleNamespace(NVMLError=NvmlError), 0)
    assert card == GpuInfo(uuid="GPU-0", peers=[GpuPeer(uuid="GPU-1"), GpuPeer(uuid="GPU-2")])


def test_the_driver_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    links, _ = links_of(nvml, 0)
    asked = nvml.asked
    links.read(nvml)
    assert nvml.asked == asked
    monkeypatch.setattr(card_links.time, "monotonic", lambda: 1e9)
    links.read(nvml)
    assert nvml.asked > asked
