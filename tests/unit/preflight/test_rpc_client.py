"""What an agent answers that is not what it was asked: the host is named, whatever it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zrun.preflight.host_checks import HostRequirements
from zrun.preflight.inspection import check_hosts
from zrun.transport.agent_process import AgentProcess, close_all
from zrun_core.errors import ExitCode, PreflightError


class Scripted(AgentProcess):
    """Says hello, and gives one answer to whatever it is asked."""

    def __init__(self, host: str, answer: Any) -> None:
        says = json.dumps(answer)
        script = f"echo '{{\"frame\":\"hello\"}}'; head -c 10 >/dev/null; echo '{says}'; sleep 60"
        super().__init__(host, ["sh", "-c", script])

    def end_reason(self) -> str:
        return f"{self.host}: it ended"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"report": None},
        {"report": {"facts": 3}, "heard": 0, "said": 0},
        {"report": [], "heard": "noon", "said": {}},
        {"heard": 1.0},
        {"error": {"deep": [1]}},
    ],
)
def test_an_agent_that_answers_nonsense_is_a_host_that_cannot_be_used(
    answer: dict[str, Any],
) -> None:
    agents = [Scripted("node7", {"frame": "answer", "to": "facts", **answer})]
    try:
        with pytest.raises(PreflightError) as caught:
            check_hosts(agents, HostRequirements(), hello_s=30.0)
    finally:
        close_all(agents, 0.1)
    assert caught.value.exit_code is ExitCode.PREFLIGHT
    assert "1 of 1 host cannot be used" in str(caught.value)
    assert "node7: its agent" in str(caught.value)
