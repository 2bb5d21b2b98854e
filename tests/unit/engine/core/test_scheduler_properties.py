"""Whichever requests arrive, are aborted, finish or are preempted: outputs are right and every block is freed."""

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine_state_machine import EngineStateMachine

EngineStateMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineStateMachine.TestCase


@pytest.mark.soak
class TestEngineInManyRuns(TestEngine):
    settings = settings(TestEngine.settings, max_examples=2_000)
