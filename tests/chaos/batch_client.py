"""A client of files and batches: it uploads requests, looks after their batch at any router, and reads the output."""

import json
from contextlib import suppress
from typing import Any

import httpx
from quire_proto.errors import ErrorCode

from tests.chaos.client import Client, Pause
from tests.chaos.failure import Failure, UntypedError
from tests.chaos.workload import Request

FILES, BATCHES = "/v1/files", "/v1/batches"
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchClient(Client):
    """Each line is one choice of its answer, and the usage that of all lines. A batch that was created when the
    connection broke is found again by its metadata.
    """

    _file = ""
    _status = ""
    _output = ""
    _is_read = False

    async def _try(self, request: Request) -> bool:
        if not self._file:
            self._file = (await self._upload(request))["id"]
        if not self._id:
            batch = await self._find(request) or await self._create(request)
            self._id = batch["id"]
            self.answer.name(id=self._id)
        if not self._output:
            batch = await self._get(request, f"{BATCHES}/{self._id}")
            if batch["status"] not in _ENDED:
                raise Pause
            if (gone := _missing_file(batch, self._file)) is not None:
                self._fail(gone)
                raise _Ended
            if batch["status"] != "completed" or batch["error_file_id"] is not None:
                raise UntypedError(f"a batch that did not answer all of its lines: {batch}")
            self._output = batch["output_file_id"]
        if not self._is_read:
            content = await self._checked(
                self._http.get(f"{self._url()}{FILES}/{self._output}/content", headers=request.credentials)
            )
            self._read(request, content.text)
            self._is_read = True
        await self._delete_files(request)
        return True

    async def _upload(self, request: Request) -> dict[str, Any]:
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": request.path,
                "body": {**request.body, "prompt": prompt},
            }
            for number, prompt in enumerate(request.turns)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        files, fields = {"file": ("in.jsonl", content)}, {"purpose": "batch"}
        sent = self._http.post(self._url() + FILES, files=files, data=fields, headers=self._send(request))
        return dict((await self._checked(sent)).json())

    async def _find(self, request: Request) -> dict[str, Any] | None:
        listed = await self._get(request, f"{BATCHES}?limit=100")
        return next((each for each in listed["data"] if each["metadata"] == {"key": self._key}), None)

    async def _create(self, request: Request) -> dict[str, Any]:
        body = {
            "input_file_id": self._file,
            "endpoint": request.path,
            "completion_window": "24h",
            "metadata": {"key": self._key},
        }
        sent = self._http.post(self._url() + BATCHES, json=body, headers=request.credentials)
        return dict((await self._checked(sent)).json())

    async def _get(self, request: Request, path: str) -> dict[str, Any]:
        return dict((await self._checked(self._http.get(self._url() + path, headers=request.credentials))).json())

    async def _delete_files(self, request: Request) -> None:
        """Leaves room for the tenant's next files. One may have been deleted by a try that was not answered."""
        for file in (self._file, self._output):
            response = await self._http.delete(f"{self._url()}{FILES}/{file}", headers=request.credentials)
            if response.status_code not in (200, 404):
                self._refused(response)

    async def _checked(self, sent: Any) -> httpx.Response:
        """The answer to a request. Raises ``_Ended`` for an error that no other try cures."""
        response: httpx.Response = await sent
        if response.status_code != 200:
            self._refused(response)
            raise _Ended
        self._hear()
        return response

    async def _complete(self, request: Request) -> bool:
        try:
            return await super()._complete(request)
        except _Ended:
            return True

    def _read(self, request: Request, content: str) -> None:
        """Takes in the output: each line once, in the order of the input."""
        found = [json.loads(line) for line in content.splitlines()]
        if [each["custom_id"] for each in found] != [str(number) for number in range(len(request.turns))]:
            self.answer.malformed.append(f"the lines {[each['custom_id'] for each in found]}")
        used = 0, 0
        for each in found:
            body, number = each["response"]["body"], int(each["custom_id"])
            (choice,) = body["choices"]
            self.answer.take({"choices": [{**choice, "index": number}]})
            self.answer.name(**{f"id of line {number}": body["id"]}, model=body["model"], object=body["object"])
            used = used[0] + body["usage"]["prompt_tokens"], used[1] + body["usage"]["completion_tokens"]
        self.answer.usage = used

    async def _is_known(self, request: Request) -> bool:
        for url in self._stack.urls if self._id else ():
            with suppress(httpx.HTTPError):
                found = await self._http.get(f"{url}{BATCHES}/{self._id}", headers=request.credentials)
                if found.status_code == 200:
                    return _missing_file(found.json(), self._file) is None
        return False


def _missing_file(batch: dict[str, Any], file: str) -> Failure | None:
    """The error of a batch whose input was lost before any of it was read."""
    for error in (batch.get("errors") or {}).get("data", ()) if batch["status"] == "failed" else ():
        if error["code"] == "invalid_file" and file in error["message"]:
            return Failure(ErrorCode.NOT_FOUND, error["param"], error["message"])
    return None


class _Ended(Exception):  # noqa: N818 - the client has what there is to have
    """An error that no other try cures, which the answer has."""
