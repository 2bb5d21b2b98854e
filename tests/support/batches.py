"""What an engine says in a step, heard at once."""

from quire.v1 import engine_pb2
from quire_router.engines.session import Session


def take_all(session: Session, batch: engine_pb2.StepBatch) -> None:
    """Takes a batch's news, and hands its outputs to their requests without letting anybody else have a turn."""
    for _ in session.process_batch(batch):
        pass
