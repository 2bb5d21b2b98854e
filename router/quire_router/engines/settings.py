"""``ConnectionSettings`` of a connection to an engine, with defaults that suit a cluster, and what engines say of
their models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire.v1 import engine_pb2
from quire_proto.convert import task_from_proto
from quire_proto.engine_token import EngineTokens
from quire_proto.pooling import Task
from quire_proto.text.model_folder import read_config
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tls import ClientTls

from quire_router.core.generation import LoRA
from quire_router.discovery.base import Readiness


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Times in seconds.

    ``grace`` is how long a router tries to resume a broken stream before its requests are lost; an engine keeps them
    for about as long. Where another engine can take them, they go there after ``move_after``. An address that refuses
    connections means a lost session, so ``refused_grace`` is enough then.

    An engine that runs requests sends a message at least every half second. After ``silence`` seconds without one it
    gets no new requests, and those that it has go to another engine, where one can take them; after ``stall`` its
    stream counts as broken. Engines that others wrote are asked how they are: they have ``poll_silence`` in place of
    ``silence``, and keep their requests until ``stall``; those that answer while none of their streams advances, until
    ``stall_timeout``. An engine that was never reached, or that announced its
    shutdown, may take ``start_patience`` to start (it loads a model, the first time it builds kernels) before that is
    worth a warning. ``Describe`` is answered within ``connect_timeout``; a new session opens between two steps of the
    engine, which may be long ones, hence ``open_timeout``.

    ``slow_client_timeout`` ends a request whose tokens are not read. Batches are acknowledged after ``ack_batches`` of
    them, or ``ack_interval``, whichever comes first; while no request is in flight, after ``idle_ack_interval``. An
    acknowledgement costs as much as a batch, and only frees the engine's memory of batches that came. Between two tries
    to connect a connection waits from ``backoff`` up to ``max_backoff``, doubling. At most ``max_unsent`` requests wait
    to be sent, and ``max_unconfirmed`` that were sent are kept until the engine answers. ``tls`` encrypts the
    connections, and ``tokens`` are what engines ask for. ``api_key`` is what servers that are not Quire's ask for.
    Servers of vLLM publish their KV events on ``kv_events_port``, and again on request on ``kv_events_replay_port``;
    None: they do not. ``readiness`` says for which engines that of discovery counts.
    """

    grace: float = 5.0
    move_after: float = 0.75
    refused_grace: float = 0.2
    silence: float = 1.5
    poll_silence: float = 3.0
    stall: float = 5.0
    stall_timeout: float = 30.0
    start_patience: float = 120.0
    slow_client_timeout: float = 30.0
    connect_timeout: float = 5.0
    open_timeout: float = 30.0
    ack_batches: int = 32
    ack_interval: float = 1.0
    idle_ack_interval: float = 15.0
    backoff: float = 0.05
    max_backoff: float = 2.0
    max_unsent: int = 1024
    max_unconfirmed: int = 1024
    tls: ClientTls | None = None
    tokens: EngineTokens | None = None
    api_key: str | None = None
    readiness: Readiness = "hint"
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None

    def needs_readiness(self, *, external: bool) -> bool:
        """Whether an engine, or a server that others wrote, gets requests only while discovery finds it ready."""
        return self.readiness == "all" or (external and self.readiness == "external")


@dataclass(frozen=True, slots=True)
class ServedModelLimits:
    """What a model's engines have in common: the smallest length and vocabulary among them, in tokens; what they do
    with prompts, None while that is unknown; and the numbers of what they pool, with those that embeddings can be cut
    to.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    supported_tasks: tuple[Task, ...] | None = None
    pooled_size: int = 0
    matryoshka_dimensions: tuple[int, ...] = ()

    @classmethod
    def of(cls, described: Sequence[engine_pb2.DescribeResponse]) -> Self:
        """The limits of a model whose engines have ``described`` themselves, at least one."""
        first = described[0]
        tasks = tuple(task for each in first.supported_tasks if (task := task_from_proto(each)) is not None)
        return cls(
            max_model_len=min(each.max_model_len for each in described),
            vocab_size=min(each.vocab_size for each in described),
            eos_token_ids=tuple(first.eos_token_ids),
            supported_tasks=tasks or (Task.GENERATE,),
            pooled_size=first.pooled_size,
            matryoshka_dimensions=tuple(first.matryoshka_dimensions),
        )


@dataclass(frozen=True, slots=True)
class ServedLoRA:
    """An adapter that engines have, and the configured ``model`` that it is for."""

    model: str
    lora: LoRA


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What a router knows of a model itself, for engines that do not say it: None where its folder does not."""

    tokenizer: ModelTokenizer | None = None
    limits: ServedModelLimits | None = None


def assumed_limits(models: Mapping[str, Path]) -> dict[str, ServedModelLimits]:
    """The limits of each model by its folder's ``config.json``, if that has them. With these a request can wait for the
    first engine of a fleet that was scaled to zero; without limits it is refused.
    """
    found = ((name, _limits(folder)) for name, folder in models.items())
    return {name: limits for name, limits in found if limits is not None}


def _limits(folder: Path) -> ServedModelLimits | None:
    config = read_config(folder)
    length, vocabulary = config.get("max_position_embeddings"), config.get("vocab_size")
    if not (type(length) is int and type(vocabulary) is int and length > 0 and vocabulary > 0):
        return None
    return ServedModelLimits(max_model_len=length, vocab_size=vocabulary)
