"""The requests of a run: random prompts, conversations of a ShareGPT file, or the lengths and times of a trace.

Each is made into the bytes that are sent before any is sent. Prompts are token ids where the API takes them, so that no
tokenizer is needed and every server computes the same ones; text is made from a tokenizer.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quire_proto.folders import no_such_path
from tokenizers import Tokenizer

from quire_cli.bench.config import ServeBenchConfig, read_range_ratios

TokenIds = npt.NDArray[np.int64]
FIRST_ID = 3  # without a tokenizer; lower ids are special tokens in most vocabularies
ATTEMPTS = 10  # to write a text of exactly as many tokens as asked for
# What ``vllm bench serve`` leaves out of a ShareGPT file, in tokens.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


class DatasetError(Exception):
    """A dataset or a tokenizer cannot be read. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request: its body as it is sent, the tokens of its prompt (0 if unknown) and of its output, and the second at
    which a trace has it.
    """

    body: bytes
    prompt_len: int
    output_len: int
    time: float = 0.0


class RequestFactory:
    """Makes the requests that the settings ask for, for ``model``. Raises ``DatasetError`` if the tokenizer cannot be
    read.
    """

    def __init__(self, config: ServeBenchConfig, model: str) -> None:
        self._config = config
        self._model = model
        self._tokenizer = None if config.tokenizer is None else _load_tokenizer(config.tokenizer)
        self._ids = np.array(self._allowed_ids(), dtype=np.int64)

    def make(self, count: int, seed: int) -> list[SampleRequest]:
        """``count`` requests; fewer if a trace is shorter. Other seeds make other prompts. Raises ``DatasetError``."""
        if not count:
            return []
        rng = np.random.default_rng(seed)
        if self._config.dataset_name == "random":
            return list(self._random(count, rng))
        path = self._config.dataset_path
        assert path is not None, "the settings were checked"
        read = self._sharegpt if self._config.dataset_name == "sharegpt" else self._timed_trace
        try:
            requests = list(read(path, count, rng))
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise DatasetError(f"{path} is not UTF-8.") from None
        if not requests:
            raise DatasetError(f"{path} holds no request that can be sent.")
        return requests

    def count_tokens(self, text: str) -> int | None:
        """The tokens of ``text``, special ones not added; None without a tokenizer."""
        return None if self._tokenizer is None else len(_encode(self._tokenizer, text))

    def _allowed_ids(self) -> Sequence[int]:
        if self._tokenizer is None:
            return range(FIRST_ID, self._config.vocab_size)
        special = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        named = {number for token, number in self._tokenizer.get_vocab().items() if token in ("<unk>", "<s>", "</s>")}
        return sorted(set(self._tokenizer.get_vocab().values()) - special - named)

    def _random(self, count: int, rng: np.random.Generator) -> Iterator[SampleRequest]:
        config = self._config
        input_ratio, output_ratio = read_range_ratios(config.random_range_ratio)
        inputs = _lengths(rng, count, config.input_len or config.random_input_len, input_ratio)
        outputs = _lengths(rng, count, config.output_len or config.random_output_len, output_ratio)
        prefix = self._draw(config.random_prefix_len, rng)
        for size, output in zip(inputs, outputs, strict=True):
            suffix = self._draw(max(size, 1 - len(prefix)), rng)
            yield self._from_ids(np.concatenate([prefix, suffix]), max(1, output), rng)

    def _sharegpt(self, path: Path, count: int, rng: np.random.Generator) -> Iterator[SampleRequest]:
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            turns = [each["conversations"][:2] for each in entries if len(each.get("conversations") or ()) >= 2]
            pairs = [(str(first["value"]), str(second["value"])) for first, second in turns]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DatasetError(f"{path} is not a list of ShareGPT conversations ({error!r}).") from None
        if not self._config.disable_shuffle:
            rng.shuffle(pairs)
        usable = list(islice(self._usable(pairs), count))
        return islice(cycle(usable), count)

    def _usable(self, pairs: Sequence[tuple[str, str]]) -> Iterator[SampleRequest]:
        """Returns the conversations that are not very short and not very long."""
        given = self._config.sharegpt_len
        for prompt, answer in pairs:
            ids = [] if self._tokenizer is None else _encode(self._tokenizer, prompt)
            output = given or self.count_tokens(answer) or 0
            short = given is None and output < SHORTEST
            fits = SHORTEST <= len(ids) <= LONGEST_PROMPT and len(ids) + output <= LONGEST
            if self._tokenizer is None or (fits and not short):
                yield self._request(prompt if self._config.sends_text else ids, len(ids), output)

    def _timed_trace(self, path: Path, count: int, rng: np.random.Generator) -> Iterator[SampleRequest]:
        """The rows of a trace, in the order of their times, which begin at 0; prompts share the tokens of equal ids."""
        seed, size = int(rng.integers(1 << 62)), self._config.timed_trace_chunk_hash_size
        spread = np.random.default_rng([seed, 2])
        first: float | None = None
        requests: list[SampleRequest] = []
        with path.open(encoding="utf-8") as file:
            read = _read_azure if path.suffix == ".csv" else _read_mooncake
            for row, found in enumerate(islice(read(path, file, self._config.timed_trace_sec_multiplier), count)):
                first = found.time if first is None else first
                if not 0 <= found.time - first < math.inf:
                    raise DatasetError(f"{path}, row {row}: its time is before the first one's, or none.")
                ids = self._trace_prompt(max(1, found.input_len), found.chunks, size, (seed, row))
                request = self._from_ids(ids, max(1, found.output_len), rng)
                requests.append(replace(request, time=found.time - first))
        if jitter := self._config.timed_trace_jitter_sec:
            requests = [replace(each, time=each.time + jitter * float(spread.random())) for each in requests]
        return iter(sorted(requests, key=lambda request: request.time))

    def _trace_prompt(self, length: int, chunks: Sequence[int], size: int, key: tuple[int, int]) -> TokenIds:
        """``length`` tokens: ``size`` for each id, equal for equal ids, and those that are left of the row's own."""
        seed, row = key
        parts = [self._draw(size, np.random.default_rng([seed, 0, abs(number)])) for number in chunks]
        known = sum(map(len, parts))
        parts.append(self._draw(max(0, length - known), np.random.default_rng([seed, 1, row])))
        return np.concatenate(parts)[:length]

    def _draw(self, count: int, rng: np.random.Generator) -> TokenIds:
        return self._ids[rng.integers(0, len(self._ids), size=count)]

    def _from_ids(self, ids: TokenIds, output: int, rng: np.random.Generator) -> SampleRequest:
        tokens: list[int] = ids.tolist()
        if not self._config.sends_text:
            return self._request(tokens, len(tokens), output)
        assert self._tokenizer is not None, "the settings were checked"
        text, length = self._write_text(self._tokenizer, tokens, rng)
        return self._request(text, length, output)

    def _write_text(self, tokenizer: Tokenizer, tokens: list[int], rng: np.random.Generator) -> tuple[str, int]:
        """A text of as many tokens, as nearly as it can be: decoded tokens may be read as others. Returns how many it
        has.
        """
        wanted, text, found = len(tokens), "", tokens
        for _ in range(ATTEMPTS):
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            found = _encode(tokenizer, text)
            if len(found) == wanted:
                break
            more = self._draw(max(0, wanted - len(found)), rng).tolist()
            tokens = found[:wanted] + more
        return text, len(found)

    def _request(self, prompt: str | list[int], prompt_len: int, output_len: int) -> SampleRequest:
        body: dict[str, Any] = {"model": self._model}
        if self._config.backend == "openai-chat":
            body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
        else:
            body |= {"prompt": prompt, "max_tokens": output_len}
        body |= {"stream": True, "stream_options": {"include_usage": True}} | self._config.sampling
        return SampleRequest(json.dumps(body, separators=(",", ":")).encode(), prompt_len, output_len)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a trace: its time in seconds, its lengths in tokens, and the ids of its prompt's chunks."""

    time: float
    input_len: int
    output_len: int
    chunks: Sequence[int] = ()


def _read_mooncake(path: Path, file: Iterable[str], seconds: float) -> Iterator[_Row]:
    """Lines of JSON with ``timestamp``, whose unit is ``seconds`` long, ``input_length``, ``output_length`` and
    perhaps ``hash_ids``, as Mooncake publishes.
    """
    for row, line in enumerate(file):
        try:
            fields = json.loads(line)
            chunks = [int(number) for number in fields.get("hash_ids") or ()]
            time = float(fields["timestamp"]) * seconds
            yield _Row(time, int(fields["input_length"]), int(fields["output_length"]), chunks)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DatasetError(f"{path}, row {row}: not a row of a timed trace ({error!r}).") from None


def _read_azure(path: Path, file: Iterable[str], seconds: float) -> Iterator[_Row]:
    """CSV with ``TIMESTAMP``, which is a date and time, ``ContextTokens`` and ``GeneratedTokens``, as Azure
    publishes. A second of its clock becomes ``seconds``.
    """
    for row, fields in enumerate(csv.DictReader(file)):
        try:
            time = datetime.fromisoformat(fields["TIMESTAMP"]).replace(tzinfo=UTC).timestamp() * seconds
            yield _Row(time, int(fields["ContextTokens"]), int(fields["GeneratedTokens"]))
        except (ValueError, TypeError, KeyError) as error:
            raise DatasetError(f"{path}, row {row}: not a row of a timed trace ({error!r}).") from None


def _lengths(rng: np.random.Generator, count: int, mean: int, ratio: float) -> list[int]:
    """Lengths drawn evenly from ``mean`` less ``ratio`` of it to ``mean`` and ``ratio`` of it, both included."""
    lengths: list[int] = rng.integers(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio)) + 1, count).tolist()
    return lengths


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not folder.exists():
        raise DatasetError(f"there is no tokenizer: {no_such_path(str(folder))}.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain exceptions
        raise DatasetError(f"{path} is not a tokenizer: {error}.") from None
