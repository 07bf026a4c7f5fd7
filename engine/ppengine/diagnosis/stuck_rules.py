"""Blocked work: the rules follow the waits to a node that waits for none; its state is the cause."""

from __future__ import annotations

from ppengine.diagnosis import rank_rules
from ppengine.diagnosis.budgets import (
    MOVED_S,
    PHASE_BUDGET_S,
    control_is_gone,
    idles_in_vain,
    is_unseen,
    mapping_hangs,
    really_waits,
    stuck_limit_s,
)
from ppengine.diagnosis.case import Case, thread_lines
from ppengine.diagnosis.device_evidence import stuck_stream
from ppengine.diagnosis.evidence import Key, StageEvidence
from ppengine.diagnosis.phrases import code_line, doing, seconds, where
from ppengine.diagnosis.wait_graph import (
    Node,
    Wait,
    edge_of,
    holding,
    main_of,
    masked_step,
    message_text,
    oldest_step,
    receiving_from,
    stages_of,
)
from ppengine.protocol.operation_kinds import WAIT_WORDS
from ppengine.protocol.snapshot import Cause, Verdict
from ppengine.protocol.stage_info import StreamInfo


def idlers_in_vain(case: Case) -> list[Verdict]:
    """Return the stages whose main loop is blocked while idle: the next step would hang."""
    return [
        verdict(
            stage, "self_stuck", f"{stage.name}: its main loop is blocked while idle{code_line(stage)}",
            stage.progress_age_s or 0.0,
            [f"the main loop turned {seconds(stage.progress_age_s)} ago, ten times a second is right",
             *thread_lines(stage)],
        )
        for stage in case.evidence.stages
        if idles_in_vain(stage)
    ]  # fmt: skip


def hanging_maps(case: Case) -> list[Verdict]:
    """Return the stages that get on with their steps and not with a change of their memory, in a thread apart."""
    return [_map_hangs(stage) for stage in case.evidence.stages if mapping_hangs(stage)]


def without_control(case: Case) -> list[Verdict]:
    """Return the stages that run without a control thread: a stuck one could not be reached."""
    return [_control_gone(stage) for stage in case.evidence.stages if control_is_gone(stage)]


def blocked_work(case: Case) -> list[Verdict]:
    """Return who holds up the steps in flight, once none has retired for longer than the work explains."""
    evidence, graph = case.evidence, case.graph
    held = holding(evidence)
    if not evidence.steps_in_flight or not held or None in case.guilty:
        return []
    if any(stage.phase in PHASE_BUDGET_S for stage in evidence.stages):
        return []
    since = max(stage.unretired_age_s or 0.0 for stage in held)
    if evidence.since_retired_s is not None:
        since = min(since, evidence.since_retired_s)
    limit = stuck_limit_s(evidence.stages)
    if since <= limit:
        return []
    found: dict[Key, Verdict] = {}
    for stage in held:
        chain = graph.follow(main_of(stage))
        on_the_way = {main_of(stage), *(wait.on for wait in chain)}
        if any(node.key in case.guilty or node.key in found for node in on_the_way):
            continue
        if (found or case.guilty) and not _blocked_itself(case, chain, stage, limit):
            continue
        verdict = _at_the_end(case, stage, chain, since)
        if verdict is None:
            continue
        verdict.evidence.append(f"nothing retired for {seconds(since)}; the limit for this work is {seconds(limit)}")
        verdict.evidence.append(f"steps in flight {list(evidence.steps_in_flight)}")
        found |= dict.fromkeys(case.places(verdict), verdict)
    return list({id(verdict): verdict for verdict in found.values()}.values())


def _blocked_itself(case: Case, chain: list[Wait], stage: StageEvidence, limit: float) -> bool:
    """Return whether a second end of waits has been blocked as long, so that it is no consequence of the first."""
    last = chain[-1].on if chain else main_of(stage)
    if last.kind != "main" or is_unseen(case.at(last)):
        return False  # The operation of an old sample shows nothing.
    return (case.at(last).op_age_s or 0.0) > limit


def _at_the_end(case: Case, stage: StageEvidence, chain: list[Wait], since: float) -> Verdict | None:
    """Return the verdict on the node at the end of a stage's waits; None if it has just moved."""
    if (left := rank_rules.left_out(case, chain)) is not None:
        return _without(case.at(left.on), left, since)
    cycle = case.graph.cycle(main_of(stage))
    if cycle:
        return rank_rules.undelivered(case, cycle, since) or _deadlock(case, cycle, since)
    last = chain[-1] if chain else None
    end = last.on if last is not None else main_of(stage)
    if end.kind == "link" and last is not None:
        return _link(case, end, last, since)
    root = case.at(end)
    if end.kind == "send":
        lines = ["its send thread has taken none of them", *thread_lines(root)]
        text = f"{root.name}: the send thread is stuck with {root.outbox} messages handed over"
        return verdict(root, "self_stuck", text, since, lines)
    if is_unseen(root):
        return _unseen(case, root, since)
    if (stream := stuck_stream(root)) is not None:
        return _stream_stuck(case, root, stream, since)
    if root.op in WAIT_WORDS and not _in_own_code(root):
        return _waits_for_nobody(case, root, last, since)
    if _moves(root):
        return None
    lines = [*_who_waits(case, root), *thread_lines(root)]
    return verdict(root, "self_stuck", f"{root.name} is stuck in {where(root)}{code_line(root)}", since, lines)


def _unseen(case: Case, root: StageEvidence, since: float) -> Verdict:
    """Return the verdict on the first stage that has not retired a step, while the agent looks at none.

    The core shows which stage it is. The kernel shows whether its main thread may wait for a message.
    """
    k, step, agent = root.stage, oldest_step(root), case.evidence.agent
    age = "never" if root.sample_age_s is None else f"not for {seconds(root.sample_age_s)}"
    before = f"{root.name_of(k - 1)} has retired" if k else "the core has sent"
    retired = ", ".join(f"{each.name} m{each.retired_step or 0}" for each in case.evidence.stages)
    lines = [f"retired, by the core: {retired}"]
    if root.glanced:
        place = f" in {root.wchan}" if root.wchan else ""
        lines.append(f"pid {root.pid}: main thread in state {root.process_state}{place}, read by the gateway")
    lines.append("missing: a fresh sample; the agent does not run, or hangs")
    suggest = "ppconsole logs (what became of the agent)"
    if root.glanced or agent is not None:
        suggest = f"ppconsole restart-stage {k}"
    if agent is not None:
        lines.append(f"the agent: pid {agent[0]}, process state {agent[1] or 'unknown'}")
        suggest += f" (and the agent: kill -CONT {agent[0]})" if agent[1] == "T" else ""
    # In a poll it may wait for its message, which the stage before has sent and the link has lost.
    if root.glanced and "poll" not in (root.wchan or ""):
        text = f"{root.name} is stuck in its own code with m{step}, which {before}; the agent is silent"
        return verdict(root, "self_stuck", text, since, lines, suggest)
    text = f"{root.name} has not retired m{step}, and the agent has {age} looked at {root.name}"
    return verdict(root, "undetermined", text, since, lines, suggest)


def _moves(stage: StageEvidence) -> bool:
    """Return whether a stage began an operation just before its sample, later than the core's report.

    The poll of a device begins again with each step, and does not count.
    """
    if stage.op is None or stage.op == "device" or stage.op_age_s is None:
        return False
    return stage.op_age_s - (stage.sample_age_s or 0.0) < MOVED_S


def _stream_stuck(case: Case, root: StageEvidence, stream: StreamInfo, since: float) -> Verdict:
    k, age = root.stage, seconds((stream.age_ms or 0.0) / 1e3)
    text = f"{root.name}: stream {stream.name} is stuck in m{stream.begun_step}, begun on the device {age} ago"
    lines = [*_who_waits(case, root), f"the host is in {where(root)}", *thread_lines(root)]
    suggest = f"ppconsole restart-stage {k} (ends the kernel with its process); ppconsole logs --stage {k}"
    return verdict(root, "stream_stuck", text, since, lines, suggest)


def _in_own_code(stage: StageEvidence) -> bool:
    """Return whether a stage is not in the wait that its open operation says, or has not posted what it waits for."""
    if stage.op == "idle":
        return False
    return not really_waits(stage) or (stage.op in ("receive", "token_return") and bool(stage.edges))


def _waits_for_nobody(case: Case, root: StageEvidence, last: Wait | None, since: float) -> Verdict | None:
    """Return the verdict on a stage that waits for no known cause; None if it has left its step."""
    finished, oldest = root.finished_step, oldest_step(root)
    if root.op == "idle" and last is not None and _left_out(root, last):
        return _without(root, last, since)
    if root.op == "idle" and case.edges_close:
        return None
    if root.op == "idle" and root.unretired_age_s is not None and finished is not None:
        if finished >= oldest:
            text = f"{root.name} finished step {oldest}, and the core has no report of it"
        else:
            text = f"{root.name} has not got step {oldest}, which the core sent {seconds(root.unretired_age_s)} ago"
        lines = [
            f"{root.name}: {doing(root)}, finished {finished}, acknowledged {root.retired_step}",
            *thread_lines(root),
        ]
        return verdict(root, "link", text, since, [*lines, "its socket to the core (`steps`) has lost a message"])
    if root.op == "mask":
        it = f"the masks of m{masked_step(root)}"
        text = f"{root.name} has not got {it}; the core sends them or gives them up in 0.1 s"
        lines = [f"{root.name}: {doing(root)}", *thread_lines(root)]
        return verdict(root, "link", text, since, [*lines, "its socket to the core (`steps`) has lost a message"])
    peer = receiving_from(root, stages_of(stage.key for stage in case.evidence.stages))
    text = f"{root.name} is in {doing(root)} and nothing shows why"
    kind = "send" if root.op == "room" else "receive"
    edge = edge_of(root, kind, peer) if peer is not None else None
    shown = [f"{root.name} on this edge: {message_text(edge.messages[-1])}"] if edge and edge.messages else []
    missing = "missing: the messages sent and posted on this edge" + ("" if edge else " by this stage")
    return verdict(root, "undetermined", text, since, [*shown, *thread_lines(root), missing])


def _left_out(stage: StageEvidence, wait: Wait) -> bool:
    """Return whether a stage has finished the step whose message another one waits for it to send or receive."""
    return wait.known and bool(wait.step) and (stage.finished_step or 0) >= (wait.step or 0)


def _without(stage: StageEvidence, wait: Wait, since: float) -> Verdict:
    done, wanted = ("receiving", "has sent") if wait.waiter.kind == "send" else ("sending", "waits for")
    if wait.rank:
        done, wanted = "launching", "waits in"
    it = "it" if not wait.rank else wait.text.removeprefix("its part of ")
    text = f"{stage.name} finished m{wait.step} without {done} {it}; {wait.waiter} {wanted} it"
    lines = [f"{wait.waiter}: {wait.text}", f"{stage.name}: {doing(stage)}"]
    return verdict(stage, "mismatch", text, since, lines)


def _deadlock(case: Case, cycle: list[Wait], since: float) -> Verdict:
    for wait in cycle:
        # Who waits for what will never come may be waited for in turn, for that very reason.
        receives = wait.waiter.stage >= 0 and case.at(wait.waiter).op in ("receive", "token_return")
        if receives and wait.on.kind == "main" and _left_out(case.at(wait.on), wait):
            return _without(case.at(wait.on), wait, since)
    waiters = {wait.waiter.key for wait in cycle if wait.waiter.stage >= 0}
    inside = [stage for stage in case.evidence.stages if stage.key in waiters]
    parts = [f"{wait.waiter} waits for {wait.on}: {wait.text} for {seconds(wait.since_s)}" for wait in cycle]
    first = max((wait for wait in cycle if wait.waiter.stage >= 0), key=lambda wait: wait.since_s)
    root = case.at(first.waiter)
    names = f"stages {' and '.join(str(stage.stage) for stage in inside)}"
    if root.ranks > 1:
        names = " and ".join(stage.name for stage in inside)
    same = len({stage.op for stage in inside}) == 1
    text = f"{names} wait for each other" + (f", both in {_verb(root)}" if same else "")
    for stage in inside:
        parts += [f"{stage.name}: {line}" for line in thread_lines(stage)]
    if not all(wait.known for wait in cycle):
        return verdict(
            root, "undetermined", text, since, [*parts, "missing: the messages sent and posted on each edge"]
        )
    return verdict(root, "deadlock", text, since, parts)


def _verb(stage: StageEvidence) -> str:
    return "send" if stage.op == "room" else str(stage.op)


def _link(case: Case, link: Node, last: Wait, since: float) -> Verdict:
    sender = case.at(link)
    text = f"link {sender.name} -> {sender.name_of(link.peer)}: message {last.number} is sent and posted, not delivered"
    lines = [f"{last.waiter}: {last.text}", f"both processes live; the sender is in {doing(sender)}"]
    suggest = f"check the network between both; ppconsole stacks --stage {link.stage}"
    return verdict(sender, "link", text, since, lines, suggest)


def _map_hangs(stage: StageEvidence) -> Verdict:
    age = stage.mapping_age_s or 0.0
    text = f"{stage.name} is stuck in map for {seconds(age)}, in a thread of its own; no step waits for it"
    lines = [f"the change is of {stage.mapping_bytes / 2**30:.1f} GiB at most", *thread_lines(stage)]
    suggest = f"ppconsole stacks --stage {stage.stage}; ppconsole restart-stage {stage.stage}"
    return verdict(stage, "self_stuck", text, age, lines, suggest)


def _control_gone(stage: StageEvidence) -> Verdict:
    age = stage.tick_age_s or 0.0
    text = f"{stage.name}: its control thread has not ticked for {seconds(age)}; its step loop goes on"
    lines = [
        f"the main loop moved {seconds(stage.progress_age_s)} ago: the GIL is not held",
        *thread_lines(stage),
        "missing: why the control thread does not tick; it may have ended",
    ]
    suggest = f"ppconsole stacks --stage {stage.stage}; ppconsole restart-stage {stage.stage}"
    return verdict(stage, "undetermined", text, age, lines, suggest)


def _who_waits(case: Case, root: StageEvidence) -> list[str]:
    waits = (wait for wait in case.graph.waits.values() if wait.on == main_of(root) and not wait.soft)
    return [f"{wait.waiter} waits for it: {wait.text}" for wait in waits]


def _suggest(stage: StageEvidence, cause: Cause) -> str:
    """Return the suggestion: to look, and, once stacks show blocked code, to restart."""
    look = f"ppconsole stacks --stage {stage.stage}"
    looked = stage.stack is not None and stage.stack.pid == stage.pid
    if not looked or cause not in ("self_stuck", "gil_held", "deadlock"):
        return look
    return f"ppconsole restart-stage {stage.stage} (or look: {look})"


def verdict(
    stage: StageEvidence, cause: Cause, summary: str, since: float, evidence: list[str], suggest: str = ""
) -> Verdict:
    """Return a verdict on a stage; without `suggest`, with the suggestion of its cause."""
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause=cause,
        summary=summary,
        since_s=since,
        evidence=list(evidence),
        suggest=suggest or _suggest(stage, cause),
    )
