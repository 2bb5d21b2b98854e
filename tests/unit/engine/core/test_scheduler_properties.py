"""Whatever arrives, is aborted, finishes or is preempted: outputs are right and every block comes back."""

from hypothesis import HealthCheck, settings

from tests.support.engine_machine import EngineMachine

EngineMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineMachine.TestCase
