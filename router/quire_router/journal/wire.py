"""Many commands to Redis in one write, and their answers. Knows nothing of records."""

import asyncio
from collections.abc import Iterable
from typing import Any

from hiredis import pack_command
from redis.asyncio import Redis
from redis.exceptions import ResponseError


def encode_command(*command: str | int | bytes) -> bytes:
    """A command as ``Wire`` sends it."""
    packed: bytes = pack_command(command)  # type: ignore[arg-type]  # the library's type says that it takes one word
    return packed


class PipelinedConnection:
    """Exchanges commands over one of ``client``'s connections, which need no answer timeout of their own.

    The library's own pipeline encodes each word in Python and arms a timer for each answer, which takes five times as
    long as all that Redis needs of this process. Here hiredis encodes, and one timer of ``timeout`` seconds watches
    over the whole exchange.
    """

    def __init__(self, client: Redis, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    async def execute(self, commands: Iterable[bytes]) -> list[Any]:
        """The answer to each command in order, errors that Redis answers among them. Raises what the client raises."""
        pool: Any = self._client.connection_pool
        async with asyncio.timeout(self._timeout):
            connection = await pool.get_connection()
            try:
                return await _execute(connection, list(commands))
            finally:
                await pool.release(connection)


async def _execute(connection: Any, commands: list[bytes]) -> list[Any]:
    await connection.send_packed_command(commands)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers
