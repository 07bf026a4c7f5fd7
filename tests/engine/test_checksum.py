"""The checksum of hidden states: over a real wire, in a stage's checks, in the core's switch, as a verdict."""

import threading

import pytest
import torch
from diagnosis_world import evidence, healthy
from ppengine.diagnosis import diagnose
from ppengine.protocol.steps import Check
from ppengine.stage import checks as stage_checks
from ppengine.stage.checks import StageChecks
from ppengine.stage.checksum import checksum, difference
from ppengine.stage.edge import Edge
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.generations import Generations
from ppengine.stage.meeting import meet


@pytest.fixture
def edges(tmp_path):
    """Return both ends of an edge from stage 1 to stage 2."""
    ends = {}

    def open_end(upstream, peer):
        ends[upstream] = Edge(meet(FolderBook(tmp_path, 1), "g1-e1", upstream, peer, lambda: False), upstream)

    threads = [threading.Thread(target=open_end, args=end) for end in ((True, 2), (False, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield ends[True], ends[False]
    ends[True].close()
    ends[False].close()


def checks():
    return StageChecks(2, 0, Generations(1))


@pytest.fixture
def at_once(monkeypatch):
    """Report a change without a wait for a second one."""
    monkeypatch.setattr(stage_checks, "SECOND_S", 0.0)


@pytest.fixture
def patiently(monkeypatch):
    """Wait for a second change longer than any test."""
    monkeypatch.setattr(stage_checks, "SECOND_S", 3600.0)


def carried(edges, step, sent, seen, summed=True):
    """Carry `sent` under the checksum of `seen`; return what arrives."""
    into = torch.empty_like(sent)
    edges[0].send(sent, step, checksum(seen) if summed else 0)
    edges[1].receive(into, step)
    return into


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_message_that_arrives_as_it_was_sent_is_no_finding(edges, dtype):
    values = torch.randn(3, 8).to(dtype)
    assert difference(2, edges[1], 1, carried(edges, 1, values, values)) is None


@pytest.mark.usefixtures("at_once")
def test_overwritten_buffer_is_found_at_the_first_message(edges):
    values, mine = torch.randn(3, 8), checks()
    for step in (1, 2):
        mine.compare(step, edges[1], carried(edges, step, values, values))
    assert mine.news() == [] and mine.compares_checksums
    wrong = values.clone()
    wrong[1, 2] += 1e-6
    mine.compare(3, edges[1], carried(edges, 3, wrong, values))
    (news,) = mine.news()
    (finding,) = news.findings
    assert (news.check, news.steps, finding.stage, finding.cause) == (Check.NO_CHECKSUM, [3], 1, "corrupted")
    assert finding.summary == "edge stage 1 -> stage 2: the hidden states of m3 changed on their way"
    assert finding.evidence[0].startswith("message 3 (m3, 3 tokens of 8 values, 96 B): checksum ")
    assert "a buffer of stage 1 or of stage 2 was overwritten" in finding.evidence[1]


def changed_twice(edges, mine, at_receiver):
    """Let messages 1 and 3 of three change at one end of the edge."""
    values = torch.randn(3, 8)
    for step in (1, 2, 3):
        wrong = values + (step != 2)
        into = carried(edges, step, values if at_receiver else wrong, values)
        mine.compare(step, edges[1], wrong if at_receiver else into)


@pytest.mark.usefixtures("patiently")
@pytest.mark.parametrize("at_receiver", [False, True])
def test_second_change_shows_the_end_that_is_at_fault(edges, at_receiver):
    mine = checks()
    changed_twice(edges, mine, at_receiver)
    (news,) = mine.news()
    (finding,) = news.findings
    assert (news.steps, finding.stage, finding.cause) == ([1], 2 if at_receiver else 1, "corrupted")
    assert finding.summary == "edge stage 1 -> stage 2: the hidden states of m1 changed on their way"
    assert finding.evidence[1].startswith("message 3 arrived as it was sent" if at_receiver else "message 3 had the ")
    assert finding.evidence[1].endswith(f"a buffer of stage {finding.stage} was overwritten")
    assert not mine.compares_checksums, "all that follows is wrong, too"
    carried(edges, 4, torch.zeros(3, 8), torch.zeros(3, 8))
    assert edges[1].arrived == 0, "no more sums at the arrival"


@pytest.mark.usefixtures("patiently")
def test_first_change_is_held_for_a_second_one(edges):
    values, mine = torch.randn(3, 8), checks()
    mine.compare(1, edges[1], carried(edges, 1, values, values + 1))
    assert mine.news() == [] and mine.compares_checksums
    carried(edges, 2, values, values)
    mine.compare(2, edges[1], values + 1)
    ((finding,),) = [news.findings for news in mine.news()]
    assert finding.stage == 2


@pytest.mark.usefixtures("at_once")
def test_end_that_shows_late_corrects_the_report(edges, monkeypatch):
    monkeypatch.setattr(stage_checks, "AGAIN_S", 0.0)
    values, mine = torch.randn(3, 8), checks()
    mine.compare(1, edges[1], carried(edges, 1, values, values + 1))
    ((finding,),) = [news.findings for news in mine.news()]
    assert finding.stage == 1, "the sender, for want of more"
    carried(edges, 2, values, values)
    mine.compare(2, edges[1], values + 1)
    ((finding,),) = [news.findings for news in mine.news()]
    assert finding.stage == 2


def test_buffer_that_changes_after_its_arrival_is_found(edges):
    values = torch.randn(3, 8)
    arrived = carried(edges, 1, values, values)
    arrived[0, 0] = 7.0
    assert difference(2, edges[1], 1, arrived) is not None


def test_message_without_a_checksum_is_not_compared(edges):
    values = torch.randn(3, 8)
    assert difference(2, edges[1], 1, carried(edges, 1, values, values + 1, summed=False)) is None
    assert checksum(torch.zeros(1, 8)) != 0, "no checksum is taken for none"


def test_new_generation_and_the_switch_begin_again(edges):
    values, generations = torch.randn(3, 8), Generations(1)
    mine = StageChecks(2, 0, generations)
    mine.compare(1, edges[1], carried(edges, 1, values, values + 1))
    mine.apply(Check.NO_CHECKSUM)
    assert not mine.checksum and not mine.compares_checksums
    mine.apply(0)
    assert mine.compares_checksums and [each.findings for each in mine.news()] == [[]]
    mine.compare(2, edges[1], carried(edges, 2, values, values + 1))
    generations.announce(2, 1)
    generations.enter()
    assert mine.compares_checksums


@pytest.mark.parametrize("since_s", [0.4, 60.0])
def test_finding_is_a_verdict_on_the_edge(edges, since_s):
    import msgspec

    values = torch.randn(3, 8)
    finding = difference(2, edges[1], 1, carried(edges, 1, values, values + 1))
    (verdict,) = diagnose(evidence(healthy(3), findings=(msgspec.structs.replace(finding, since_s=since_s),)))
    assert (verdict.stage, verdict.cause, verdict.root) == (1, "corrupted", True)
    assert verdict.suggest.startswith("ppconsole restart-stage 1 ")
