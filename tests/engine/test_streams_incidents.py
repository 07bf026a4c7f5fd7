"""The two incidents and their kin on fake streams: the corruption is real, the ledger names it, the fix mends both."""

from __future__ import annotations

import math
from functools import partial

import pytest
from ppengine.drills import connector_forms
from ppengine.drills.fake_streams import FakeRuntime
from ppengine.drills.incident_programs import INCIDENTS, Played
from ppengine.protocol.reports import Finding
from ppengine.stage.ledger.ledger import Ledger

RUNS = 5
"""Each is run so often: an incident that shows now and then would be no test."""


def play(name: str, *, fixed: bool = False, on: bool = True, strict: bool = False) -> tuple[Played, list[Finding]]:
    ledger = Ledger(3)
    ledger.thread("main")
    ledger.switch(on)
    ledger.strict = strict
    return INCIDENTS[name](FakeRuntime(ledger), fixed), ledger.findings()


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_corruption_is_real_and_found_each_time(name: str) -> None:
    for _ in range(RUNS):
        played, findings = play(name)
        assert played.corrupt
        assert findings
        for finding in findings:
            assert finding.stage == 3
            assert finding.summary.startswith("stage 3: ")
            assert len(finding.summary) <= 100


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_fix_mends_the_bytes_and_the_finding_disappears(name: str) -> None:
    for _ in range(RUNS):
        played, findings = play(name, fixed=True)
        assert not played.corrupt, played
        assert findings == []


@pytest.mark.parametrize("name", INCIDENTS)
def test_off_finds_nothing_and_changes_nothing(name: str) -> None:
    played, findings = play(name, on=False)
    assert played.corrupt
    assert findings == []


@pytest.mark.parametrize("name", [name for name in INCIDENTS if name != "foreign-device"])
def test_strict_order_masks_the_corruption_but_not_the_finding(name: str) -> None:
    """What CUDA_LAUNCH_BLOCKING does to such a bug; that it is there is said all the same."""
    played, findings = play(name, strict=True)
    assert not played.corrupt, played
    assert [(f.cause, f.summary) for f in findings] == [(f.cause, f.summary) for f in play(name)[1]]


def text_of(finding: Finding) -> str:
    return "\n".join([finding.summary, *finding.evidence])


def test_stale_seqstart_names_both_call_sites_and_the_wait_that_is_missing() -> None:
    played, findings = play("stale-seqstart")
    assert played.got == [0, 5, 14, 16], "the offsets of the step before"
    assert played.got[-1] != played.expected[-1], "they do not end at the step's tokens"
    (finding,) = findings
    assert finding.cause == "stream_order"
    assert finding.summary == "stage 3: metadata reads seqstart without waiting for compute, which writes it"
    written, read, what, fix = finding.evidence[:4]
    assert written.startswith("written by: copy of seqstart on stream compute (cuda:0, owner main")
    assert "drills/incident_programs.py:" in written and written.endswith(" _copy_to_device")
    assert read.startswith("read by: pickling of seqstart on stream metadata")
    assert "drills/incident_programs.py:" in read and read.endswith(" _pickle")
    assert "seqstart generation" in what
    assert fix == "to fix: record an event on compute behind the write, and let metadata wait for it before the read"


def test_global_stream_names_the_owner_and_who_redirected_it() -> None:
    played, findings = play("global-stream")
    assert not played.error
    assert all(math.isnan(value) for value in played.got)
    owner, order = findings
    assert (owner.cause, order.cause) == ("stream_owner", "stream_order")
    assert owner.summary == "stage 3: thread main launches on stream kv-load, which thread kv-connector owns"
    text = text_of(owner)
    assert "launched: all_reduce by thread main, at drills/incident_programs.py:" in text
    assert "was made at drills/incident_programs.py:" in text
    assert "thread kv-connector made it the current stream at drills/incident_programs.py:" in text
    assert "thread main itself had made compute current" in text
    assert order.summary == "stage 3: kv-load reads partial sums without waiting for compute, which writes it"


def test_foreign_device_is_told_before_the_call_fails() -> None:
    played, findings = play("foreign-device")
    assert played.error == "CUDA error 400: invalid resource handle"
    summaries = [finding.summary for finding in findings if finding.cause == "stream_owner"]
    assert summaries == [
        "stage 3: thread main launches on stream kv-load, which thread kv-connector owns",
        "stage 3: stream kv-load of cuda:0 is used with thread main of cuda:2",
    ]


def test_setting_the_device_alone_mends_the_error_and_not_the_order() -> None:
    """`global-stream` is `foreign-device` with the device set: no error 400 any more, and NaN."""
    assert not play("global-stream")[0].error
    assert play("global-stream")[0].corrupt


def test_of_three_forms_of_a_connector_only_the_store_has_no_finding() -> None:
    found = {name: connector_forms.play(form, 3) for name, form in connector_forms.FORMS.items()}
    *old, (ours, findings) = found.values()
    assert [played.corrupt for played, _ in old] == [True, True]
    redirected = "stage 3: thread step loop launches on stream kv-load, which thread kv-connector owns"
    assert [findings[0].summary for _, findings in old] == [redirected, redirected]
    assert not ours.corrupt and not findings


def test_the_ledger_watches_the_copy_of_a_store_as_any_other() -> None:
    played, findings = connector_forms.play(partial(connector_forms.by_store, waits=False), 3)
    assert played.corrupt
    assert [one.summary for one in findings] == [
        "stage 3: compute reads KV block 4 without waiting for swap in, which writes it"
    ]


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("overwritten-in-flight", "stage 3: compute rewrites hidden while send may still read it"),
        ("freed-in-flight", "stage 3: compute frees hidden while send may still read it"),
    ],
)
def test_buffers_in_flight(name: str, summary: str) -> None:
    (finding,) = play(name)[1]
    assert (finding.cause, finding.summary) == ("stream_order", summary)
    assert sum("drills/incident_programs.py:" in line for line in finding.evidence) == 2
