"""Whichever requests arrive, are aborted, finish or are preempted: outputs are right and every block is freed."""

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine_state_machine import EngineStateMachine


class StatesStateMachine(EngineStateMachine):
    """The same engine, of a model with layers that keep a state."""

    keeps_states = True


SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
EngineStateMachine.TestCase.settings = StatesStateMachine.TestCase.settings = SETTINGS
TestEngine, TestEngineWithStates = EngineStateMachine.TestCase, StatesStateMachine.TestCase


@pytest.mark.soak
class TestEngineInManyRuns(TestEngine):
    settings = settings(TestEngine.settings, max_examples=2_000)


@pytest.mark.soak
class TestEngineWithStatesInManyRuns(TestEngineWithStates):
    settings = settings(TestEngineWithStates.settings, max_examples=2_000)
