"""Answers questions from the gateway's own data: logs, audit, versions, findings, the record of a fault."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.gateway.audit import audit_file
from ppengine.protocol import frames
from ppengine.protocol.backend_fields import without_secrets
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import AboutDetail, AuditDetail, FaultDetail, FindingsDetail, LogsDetail
from ppengine.protocol.log_tail import LINES_MOST, last_lines, tail
from ppengine.protocol.reports import Finding

_PACKAGES = ("ppconsole", "torch", "numba", "transformers", "tokenizers", "safetensors", "pyzmq", "msgspec", "ray")


class LocalAnswers:
    """`answer` returns None for questions that need core or agent."""

    def __init__(
        self,
        config: EngineConfig,
        fault: Callable[[], FaultDetail | None],
        findings: Callable[[], list[Finding]],
    ) -> None:
        self._config, self._fault, self._findings = config, fault, findings
        self._run_dir = Path(config.run_dir)

    def answer(self, question: Inspect) -> Inspected | Failed | None:
        """Return the answer to `question`; None if it needs core or agent."""
        detail: msgspec.Struct | None
        if question.what == "logs":
            if question.stage is not None and not 0 <= question.stage < self._config.stages:
                text = f"no stage {question.stage}: this engine has 0 to {self._config.stages - 1}"
                return Failed(nonce=question.nonce, code="NOT_FOUND", text=text)
            detail = LogsDetail(lines=tail(self._run_dir, question.lines, question.stage))
        elif question.what == "audit":
            lines = max(0, min(question.lines, LINES_MOST))
            detail = AuditDetail(lines=last_lines(audit_file(self._run_dir), lines))
        elif question.what == "findings":
            detail = FindingsDetail(findings=self._findings())
        elif question.what == "about":
            detail = self._about()
        elif question.what == "fault":
            detail = self._fault()
            if detail is None:
                return Failed(nonce=question.nonce, code="NOT_FOUND", text="this engine has had no fault yet")
        else:
            return None
        return Inspected(nonce=question.nonce, what=question.what, data=msgspec.Raw(frames.encode(detail)))

    def _about(self) -> AboutDetail:
        versions = {"python": platform.python_version()}
        for name in _PACKAGES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "not installed"
        profile = msgspec.to_builtins(self._config.profile)
        for backend in profile["tiers"]["backends"].values():
            backend["url"] = without_secrets(backend["url"])
        if (endpoint := profile["http"]["otlp_traces_endpoint"]) is not None:
            profile["http"]["otlp_traces_endpoint"] = without_secrets(endpoint)
        return AboutDetail(
            versions=versions,
            profile=profile,
            platform=platform.platform(),
            host=socket.gethostname(),
            started_wall=self._config.started_wall,
            layers=[list(layers) for layers in self._config.layers],
        )
