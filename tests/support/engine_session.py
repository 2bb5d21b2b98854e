"""One Session stream to an engine, as a router holds it, for tests and benchmarks that speak to an engine directly."""

from queue import SimpleQueue

import grpc
from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc
from quire_proto.convert import sampling_to_proto
from quire_proto.sampling import SamplingParams

from tests.support.processes import Engine


class EngineSession:
    """One stream to an engine, as a router holds it."""

    def __init__(self, engine: Engine, session_id: str, last_sequence: int = 0) -> None:
        self._channel = grpc.insecure_channel(engine.address)
        self._commands: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        self._stream = engine_pb2_grpc.EngineStub(self._channel).Session(iter(self._commands.get, None))
        self.send(open=pb.Open(session_id=session_id, last_sequence=last_sequence))

    def send(self, **command: object) -> None:
        self._commands.put(pb.SessionRequest(**command))

    def submit(
        self, request_id: str, prompt: list[int], output: tuple[int, ...] = (), lora: str = "", **params: object
    ) -> None:
        settings = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params}
        sampling = sampling_to_proto(SamplingParams(**settings))
        self.send(
            submit=pb.Submit(
                request_id=request_id,
                prompt_token_ids=prompt,
                output_token_ids=output,
                sampling=sampling,
                lora_name=lora,
            )
        )

    @property
    def engine(self) -> engine_pb2_grpc.EngineStub:
        """The engine's other methods."""
        return engine_pb2_grpc.EngineStub(self._channel)

    def snapshot(self) -> pb.Snapshot:
        return next(self._stream).snapshot

    def batch(self) -> pb.StepBatch:
        return next(self._stream).step_batch

    def collect(self, request_id: str) -> tuple[list[int], pb.SequenceOutput]:
        """All tokens of a request and its last output."""
        tokens: list[int] = []
        while True:
            for output in self.batch().outputs:
                if output.request_id == request_id:
                    assert not output.token_ids or output.position == len(tokens) + self.skipped
                    tokens += output.token_ids
                    if output.finish_reason:
                        return tokens, output

    skipped = 0

    def break_off(self) -> None:
        self._channel.close()
        self._commands.put(None)

    def __enter__(self) -> "EngineSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.break_off()


def check_events_match_snapshot(engine: Engine) -> None:
    """Asserts that a second session's snapshot has the cached blocks that the first one's snapshot and events add up
    to.
    """
    with EngineSession(engine, "filling") as link:
        cached = {name for stored in link.snapshot().cached for name in stored.block_hashes}
        link.submit("a", [7, 8, 9] * 20)
        while True:
            batch = link.batch()
            for event in batch.kv_events:
                cached.update(event.stored.block_hashes)
                cached.difference_update(event.removed.block_hashes)
            if any(output.finish_reason for output in batch.outputs):
                break
    with EngineSession(engine, "hearing") as link:
        names = [name for stored in link.snapshot().cached for name in stored.block_hashes]
    assert len(names) >= 3
    assert set(names) == cached
