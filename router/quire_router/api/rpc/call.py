"""One gRPC call as the methods see it: its metadata in and out."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_router.api.frontend import counting_rejections
from quire_router.api.identity import ANONYMOUS, Identity
from quire_router.api.rpc.errors import REQUEST_ID
from quire_router.api.rpc.types import Context
from quire_router.api.terms import RequestOptions, options_from_metadata


@dataclass(slots=True)
class RpcCall:
    """``request_id`` is that of the request which is answered. ``caller`` is known once the key was checked."""

    context: Context
    request_id: str
    caller: Identity = ANONYMOUS

    @property
    def headers(self) -> dict[str, str]:
        """Metadata that are text, by name; of several with one name, the last."""
        return {name: value for name, value in self._metadata if isinstance(value, str)}

    def values(self, name: str) -> list[str]:
        """Every text of a name in the metadata."""
        return [value for key, value in self._metadata if key == name and isinstance(value, str)]

    def terms(self, *, has_deadline: bool) -> RequestOptions:
        """What the call says beside its message; whether its deadline is the answer's. Raises ``QuireError``."""
        with counting_rejections():
            return options_from_metadata(self.values, self.context.time_remaining() if has_deadline else None)

    async def begin(self, notes: Mapping[str, str]) -> None:
        """Sends the metadata that come before the first message."""
        await self.context.send_initial_metadata(((REQUEST_ID, self.request_id), *notes.items()))

    def end(self, notes: Mapping[str, str]) -> None:
        """Sets the metadata that come behind the last message."""
        self.context.set_trailing_metadata(((REQUEST_ID, self.request_id), *notes.items()))

    @property
    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple(self.context.invocation_metadata() or ())
