"""The command line, the words of a verb, the confirm dialog's rows, the selection."""

from __future__ import annotations

import re

import msgspec
import pytest
import snapshots
from ppconsole.view import commands, completion, plan
from ppconsole.view.cells import text_of
from ppconsole.view.cursor import Cursor
from ppengine.protocol.control import Conflict, Outcome, Refused
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.store_verbs import StoreAdd, StorePause, StoreResume
from ppengine.protocol.tiers import BackendInfo, TiersInfo
from ppengine.protocol.verbs import (
    Abort,
    ClearFaults,
    Continue,
    Cordon,
    Drain,
    Fault,
    Many,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    SwapIn,
    SwapOut,
)


@pytest.mark.parametrize(
    ("line", "verb", "shell"),
    [
        ("abort r-1", Abort(request="r-1"), "abort r-1"),
        (
            "preempt r-1 --mode swap --hold",
            Preempt(request="r-1", mode="swap", hold=True),
            "preempt --mode swap --hold r-1",
        ),
        ("preempt --mode=recompute r-1", Preempt(request="r-1", mode="recompute"), "preempt --mode recompute r-1"),
        ("swap-out r-1 --no-hold", SwapOut(request="r-1", hold=False), "swap-out --no-hold r-1"),
        ("swap-in r-1", SwapIn(request="r-1"), "swap-in r-1"),
        ("release", Release(request="r-sel"), "release r-sel"),
        ("store pause nvme0", StorePause(backend="nvme0"), "store pause nvme0"),
        (
            "store add c0 valkey redis://host/0 --write always",
            StoreAdd(backend="c0", kind="valkey", url="redis://host/0", write="always"),
            "store add c0 valkey redis://host/0 --write always",
        ),
        ("store add c0 memory", StoreAdd(backend="c0", kind="memory"), "store add c0 memory"),
        ("priority r-1 5", Priority(request="r-1", priority=5), "priority r-1 5"),
        (
            "abort r-1 r-2 r-1 r-4",
            Many(verbs=[Abort(request=name) for name in ("r-1", "r-2", "r-4")]),
            "abort r-1 r-2 r-4",
        ),
        (
            "preempt r-1 r-2 --mode swap",
            Many(verbs=[Preempt(request=name, mode="swap") for name in ("r-1", "r-2")]),
            "preempt --mode swap r-1 r-2",
        ),
        (
            "priority r-1 r-2 -5",
            Many(verbs=[Priority(request=name, priority=-5) for name in ("r-1", "r-2")]),
            "priority r-1 r-2 -5",
        ),
        ("priority -5", Priority(request="r-sel", priority=-5), "priority r-sel -5"),
        ("priority -- -1 -5", Priority(request="-1", priority=-5), "priority -- -1 -5"),
        (
            "submit --priority -2 x",
            Submit(prompt="x", priority=-2, sampling=SamplingParams(max_tokens=256, temperature=0.8)),
            "submit x --max-tokens 256 --temperature 0.8 --priority -2",
        ),
        ("set-memory 0.5", SetMemory(utilization=0.5), "set-memory 0.5"),
        ("set-memory -.5", SetMemory(utilization=-0.5), "set-memory -0.5"),
        ("pause --mode keep", Pause(mode="keep"), "pause --mode keep"),
        ("resume", Resume(), "resume"),
        ("drain --undo", Drain(undo=True), "drain --undo"),
        ("continue 2", Continue(stage=2), "continue 2"),
        ("check finite on", SetCheck(check="finite"), "check finite on"),
        ("check shadow on --share=0.05", SetCheck(check="shadow", share=0.05), "check shadow on --share 0.05"),
        ("restart-stage 2", RestartStage(stage=2), "restart-stage 2"),
        ("cordon --stage 2", Cordon(stage=2), "cordon --stage 2"),
        ("cordon --undo --stage=2", Cordon(stage=2, undo=True), "cordon --stage 2 --undo"),
        ("stop", Stop(), "stop"),
        ("fault sigkill --stage 1", Fault(kind="sigkill", stage=1), "fault sigkill --stage 1"),
        ("clear-faults", ClearFaults(), "fault --clear"),
        (
            "submit 'a fox' --max-tokens 12 --temperature 0 --stop-token-ids 2,3 --stop END --chat",
            Submit(
                prompt="a fox", chat=True,
                sampling=SamplingParams(max_tokens=12, temperature=0.0, stop=["END"], stop_token_ids=[2, 3]),
            ),
            "submit 'a fox' --max-tokens 12 --temperature 0 --stop END --stop-token-ids 2,3 --chat",
        ),
        (
            "submit x --logit-bias 5:-100,7:2.5 --bad-words 'a b' --bad-words c --presence-penalty -1.5 --min-p .1",
            Submit(
                prompt="x",
                sampling=SamplingParams(
                    max_tokens=256, temperature=0.8, logit_bias={5: -100.0, 7: 2.5}, bad_words=["a b", "c"],
                    presence_penalty=-1.5, min_p=0.1,
                ),
            ),
            "submit x --max-tokens 256 --temperature 0.8 --min-p 0.1 --presence-penalty -1.5"
            " --logit-bias 5:-100,7:2.5 --bad-words 'a b' --bad-words c",
        ),
        (
            "submit tell me -n 2",
            Submit(prompt="tell me", sampling=SamplingParams(n=2, max_tokens=256, temperature=0.8)),
            "submit 'tell me' --max-tokens 256 --temperature 0.8 -n 2",
        ),
        (
            "submit --seed 3 -- -x",
            Submit(prompt="-x", sampling=SamplingParams(seed=3, max_tokens=256, temperature=0.8)),
            "submit --max-tokens 256 --temperature 0.8 --seed 3 -- -x",
        ),
    ],
)  # fmt: skip
def test_a_command_line_becomes_a_verb_and_a_shell_line(line, verb, shell):
    assert commands.asked(line, ["r-sel"]).verb == verb
    assert commands.cli_line(verb, "opt@n0") == f"ppconsole -e opt@n0 {shell}"
    assert commands.asked(shell).verb == verb


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("frobnicate", "not a command"),
        ("submit x --logit-bias 5", "--logit-bias is '5'; it must be ID:BIAS with commas between: 2:-100,11:4"),
        ("submit x --min-p 2", "min_p is 2.0; it must be 0 to 1"),
        (
            "preempt r-1 --mode fast",
            "'--mode': 'fast' is not one of 'recompute', 'swap'; it is written: preempt REQUEST... [--mode",
        ),
        ("abort --force r-1", "No such option '--force'; it is written: abort REQUEST... (or --owner --older --"),
        ("set-memory lots", "'lots' is no utilization; it is a number above 0 and at most 1, such as 0.5, or a change"),
        ("set-memory -20%", "the present memory is not known yet; type a utilization such as 0.5"),
        ("set-memory nan", "memory utilization is nan; it must be above 0 and at most 1; it is written: set-memory U"),
        ("set-memory -0.5 --force", "Got unexpected extra argument (--force); it is written: set-memory UTILIZATION"),
        (
            "continue -1",
            "Invalid value for 'STAGE': -1 is out of range; it must be 0 or more; it is written: continue STAGE",
        ),
        ("priority r-1 many", "'many' is no whole number; it is written: priority REQUEST... N (or --owner"),
        ("priority r-1 2147483648", "priority is 2147483648; it must be -2147483647 to 2147483647"),
        ("abort -5", "No such option '-5'; it is written: abort REQUEST... (or --owner --older --"),
        (
            "abort",
            "abort: no request is named or chosen; give ids, or --owner, --older, --state and --filter; it is written: "
            "abort REQUEST... (or --owner",
        ),
        ("pause now", "Got unexpected extra argument (now); it is written: pause [--mode wait|keep|abort]"),
        ("check finite", "Missing argument '{on|off}'. Choose from: on, off; it is written: check ledger|strict|"),
        ("check finite maybe", "'maybe' is not one of 'on', 'off'"),
        ("check shadow on --share lots", "Invalid value for '--share': 'lots' is no number"),
        ("abort 'r-1", "No closing quotation"),
        ("cordon 2", "Missing option '--stage'; it is written: cordon --stage K [--undo]"),
        ("cordon --stage two", "Invalid value for '--stage': 'two' is no whole number, 0 or more; it is written:"),
        ("cordon --undo", "Missing option '--stage'; it is written: cordon --stage K [--undo]"),
        ("submit", "Missing argument 'PROMPT...'; it is written: submit PROMPT [OPTIONS]"),
        ("submit x --max-tokens many", "Invalid value for '--max-tokens': 'many' is no whole number"),
        ("submit x --tokens 4", "No such option '--tokens'"),
        ("submit x --max-tokens 0", "max_tokens is 0; it must be at least 1"),
        ("submit x --stop-token-ids a", "--stop-token-ids is 'a'; it must be numbers with commas between: 2,50256"),
        ("fault", "Missing argument 'KIND'; it is written: fault KIND [--stage K]"),
    ],
)
def test_a_wrong_line_says_what_would_be_right(line, says):
    with pytest.raises(commands.UsageError, match=re.escape(says)):
        commands.asked(line)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("abort --owner alice", ["r-0000", "r-0005"]),
        ("abort --owner alice --state swapped", ["r-0005"]),
        ("preempt --filter 'blk>122'", ["r-0002"]),
        ("release --older 299s", ["r-0000", "r-0001"]),
        ("release", ["r-0007", "r-0003"]),
    ],
)
def test_a_line_chooses_requests_as_the_shell_does(line, names):
    verb = commands.asked(line, ["r-0007", "r-0003"], snapshot=snapshots.snapshot(4, 8)).verb
    assert commands.requests_of(verb) == names and isinstance(verb, Many) is (len(names) > 1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("abort r-1 --owner alice", "requests are named and chosen by options, too; give ids, or --owner, --older"),
        ("abort --ownr alice", "No such option '--ownr'. (Did you mean one of: '--older', '--owner'?)"),
        ("abort --filter 'blc>3'", "no field 'blc'; did you mean blk?"),
        ("abort --older 5x", "'5x' is no number with one of the units"),
        ("abort --owner carol", 'no request matches owner="carol"; 8 are here'),
        ("abort --state asleep", "'asleep' is not one of 'waiting'"),
        (f"abort {' '.join(f'r{number}' for number in range(1001))}", "1001 requests in one command; it must be 1 to"),
        ("abrot --owner alice", "did you mean abort?"),
    ],
    ids=["both", "option", "field", "age", "owner", "state", "too many", "verb"],
)
def test_a_wrong_choice_of_requests_says_what_would_be_right(line, says):
    with pytest.raises(commands.UsageError, match=re.escape(says)):
        commands.asked(line, ["r-sel"], snapshot=snapshots.snapshot(4, 8))


def test_the_rest_of_a_plan_keeps_its_revisions():
    picture = snapshots.snapshot(4, 8)
    verb = commands.guarded(commands.asked("abort r-0002 r-0003 r-gone").verb, picture)
    assert isinstance(verb, Many) and verb.revisions == [2, 3, None]
    plan_of = Outcome(id="1", op="o", state="planned", text="")
    assert commands.without_conflicts(verb, plan_of) is verb
    plan_of.conflicts = [Conflict(request=name, code="NOT_FOUND", text="gone") for name in ("r-0002", "r-gone")]
    rest = commands.without_conflicts(verb, plan_of)
    assert rest == Many(verbs=[Abort(request="r-0003")], revisions=[3])
    assert commands.target_of(rest) == "request r-0003" and commands.target_of(verb) == "3 requests"
    plan_of.conflicts += [Conflict(request="r-0003", code="CONFLICT", text="moved")]
    assert commands.without_conflicts(verb, plan_of) is None


def test_completion():
    picture = snapshots.snapshot(4, 6)

    def first(line):
        return next(iter(completion.complete(line, picture, commands.NAMES)), None)

    assert first("pre") == "preempt"
    assert first("abort r-00") == "abort r-0000"
    assert first("abort r-0000 r-0001 r-") == "abort r-0000 r-0001 r-0002", "each once"
    assert first("abort --o") == "abort --owner"
    assert completion.complete("abort --owner a", picture, ()) == ["abort --owner alice"]
    assert first("release --state h") == "release --state held"
    assert first("preempt r-1 --mode s") == "preempt r-1 --mode swap"
    assert first("check f") == "check finite"
    assert first("check finite of") == "check finite off"
    assert first("cordon --s") == "cordon --stage"
    assert first("cordon --stage ") == "cordon --stage 0"
    assert first("set max") == "set max-tokens"
    assert completion.complete("set chat o", picture, ()) == ["set chat on", "set chat off"]
    assert first("zzz") is None and first("set zzz ") is None


def test_tab_completes_as_a_shell_does():
    def find(line):
        return completion.complete(line, None, commands.NAMES)

    step = completion.advance(completion.Completion(), "st", find, 1)
    found = ("stop", "store", "stacks", "streams")
    assert (step.line, step.candidates) == ("st", found), "they share no more than is written"
    seen = []
    for _ in range(5):
        step = completion.advance(step, step.line, find, 1)
        seen.append(step.line)
    assert seen == ["stop", "store", "stacks", "streams", "stop"]
    assert completion.advance(step, step.line, find, -1).line == "streams"
    assert completion.advance(completion.Completion(), "set", find, 1).candidates == ("set-memory", "set")
    assert completion.advance(completion.Completion(), "sw", find, 1).line == "swap-", "what all share"
    assert completion.advance(completion.Completion(), "pree", find, 1) == completion.Completion("preempt ")
    assert completion.advance(completion.Completion(), "zzz", find, 1) == completion.Completion("zzz")


def test_a_shell_line_has_no_password():
    verb = commands.asked("store add c0 valkey redis://:pw@host/0").verb
    assert isinstance(verb, StoreAdd) and verb.url == "redis://:pw@host/0"
    assert commands.cli_line(verb, "") == "ppconsole store add c0 valkey redis://host/0"


def test_a_verb_of_two_words_is_completed_word_by_word():
    picture = snapshots.snapshot(2, 3)
    picture.tiers = TiersInfo(
        backends=[BackendInfo(name=name, kind="files", url="/kv", write="reused", quota_bytes=1) for name in ("a", "b")]
    )

    def found(line, role="admin"):
        return completion.complete(line, picture, commands.names_for(role))

    assert found("sto") == ["stop", "store"] and found("sto", "operator") == ["store"]
    assert found("store p") == ["store pause"] and not found("store rem", "operator")
    assert found("store pause ") == ["store pause a", "store pause b"]
    assert found("store add x files --w") == ["store add x files --write"]
    assert found("store add --write r") == ["store add --write reused"]


def test_keys_act_on_the_selected_backend_and_pause_resumes_a_paused_one():
    picture = snapshots.snapshot(2, 3)
    paused = BackendInfo(name="a", kind="files", url="/kv", write="reused", quota_bytes=1, state="paused")
    picture.tiers = TiersInfo(backends=[paused, msgspec.structs.replace(paused, name="b", state="open")])
    assert commands.of_key("store-pause", picture, [], None, backend="a") == StoreResume(backend="a")
    assert commands.of_key("store-pause", picture, [], None, backend="b") == StorePause(backend="b")
    assert commands.of_key("store-add", picture, [], None, backend="b") == "store add"
    with pytest.raises(commands.UsageError, match="store pause acts on a backend, and none is selected"):
        commands.of_key("store-pause", picture, [], None)


@pytest.mark.parametrize(
    ("word", "meant"), [("prempt", "preempt"), ("diagnsis", "diagnosis"), ("Stop", "stop"), ("qit", "quit")]
)
def test_a_mistyped_command_is_answered_with_the_nearest_one(word, meant):
    with pytest.raises(commands.UsageError, match=rf"'{word}' is not a command; did you mean {meant}\?"):
        commands.asked(f"{word} x")


def test_revision_belongs_to_the_target():
    picture = snapshots.snapshot(4, 8)
    assert commands.revision_of(Abort(request="r-0003"), picture) == 3
    assert commands.revision_of(SetMemory(utilization=0.5), picture) == 7
    assert commands.revision_of(Pause(), picture) is None


def text(rows):
    return "\n".join(text_of(row) for row in rows)


def test_confirm_rows_name_target_epoch_and_figures():
    picture = snapshots.snapshot(4, 8)
    verb = Preempt(request="r-0002")
    head = text([each.row for each in plan.head_rows(verb, picture, 2, 76)])
    assert "request r-0002 of opt@n0" in head and "epoch   b00t5eed0001   revision 2" in head and "126 blocks" in head
    lines = ["KV 1024 -> 512 blocks (-50.0 %, -66.1 MiB)", "mode swap: 2 requests, 31 blocks (4.0 MiB) go to the host"]
    planned = Outcome(
        id="1", op="o", state="planned", text=lines[0], plan=lines,
        figures={"blocks_before": 1024, "blocks_after": 512, "swap_requests": 2, "swap": 31},
    )  # fmt: skip
    rows = [line.strip() for line in text([each.row for each in plan.plan_rows(planned, 76)]).splitlines()]
    assert rows == [f"plan    {lines[0]}", lines[1]], "the words have all figures: nothing is said twice"
    refused = Refused(id="1", code="DOES_NOT_FIT", text="needs 90")
    assert "DOES_NOT_FIT" in text([each.row for each in plan.plan_rows(refused, 76)])


def test_a_conflict_says_what_changed():
    before, after = snapshots.snapshot(4, 8), snapshots.snapshot(4, 8)
    after.requests[2].state, after.requests[2].blocks = "swapped", 0
    after.engine.memory_revision, after.engine.memory_utilization = 8, 0.5
    changes = plan.changes_since(before, after, Abort(request="r-0002"))
    assert changes == ["state running > swapped", "blocks 126 > 0", "memory utilization 0.6 > 0.5, revision 7 > 8"]
    after.requests.pop(2)
    assert plan.changes_since(before, after, Abort(request="r-0002")) == ["r-0002 is gone"]


def test_the_cursor_follows_its_id():
    cursor: Cursor[str] = Cursor()
    assert cursor.sync(["a", "b", "c"]) == "a"
    cursor.move(["a", "b", "c"], 1)
    assert cursor.sync(["c", "b", "a"]) == "b" and cursor.index == 1
    assert cursor.sync(["x", "y", "c", "b"]) == "b" and cursor.index == 3


def test_when_its_id_is_gone_the_one_that_took_its_place_is_selected():
    cursor: Cursor[str] = Cursor()
    cursor.move(["a", "b", "c", "d"], 1)
    assert cursor.lost is None
    assert cursor.sync(["c", "d"]) == "c" and (cursor.lost, cursor.index) == ("b", 0), "the row above went, too"
    assert cursor.sync(["e", "d"]) == "d" and cursor.lost == "c"
    assert cursor.sync(["e", "f"]) == "e", "the last one went: the one above it"
    assert cursor.sync([]) is None and cursor.sync(["x"]) == "x"
    cursor.choose("new")
    assert cursor.sync(["x"]) is None and cursor.lost is None, "it is not listed yet"
    assert cursor.sync(["x", "new"]) == "new"
    cursor.forget()
    assert cursor.sync(["a", "c"]) == "a"


def test_the_window_keeps_the_selection_in_view():
    cursor: Cursor[int] = Cursor()
    ids = list(range(100))
    cursor.move(ids, 50)
    assert cursor.window(100, 10) == 41
    cursor.move(ids, -5)
    assert cursor.window(100, 10) == 41
    cursor.move(ids, -100)
    assert cursor.window(100, 10) == 0
    assert cursor.window(3, 10) == 0
