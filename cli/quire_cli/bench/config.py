"""The settings of ``quire bench serve``. Flags have the names and meanings of ``vllm bench serve``; each is also an
environment variable ``QUIRE_BENCH_…``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from quire_proto.cli import CliSettings, join_host_port
from quire_proto.units import Seconds

from quire_cli.machine.server import KEY_HELP, URL_HELP, base_url, key_of_environment

QUEUE_METRICS = ("client_queue_time", "ttft_including_client_queue", "e2el_including_client_queue")
METRICS = ("ttft", "tpot", "itl", "e2el", *QUEUE_METRICS)
OBJECTIVES = ("ttft", "tpot", "e2el")
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DEFAULT_CONCURRENCY = 64  # where neither a rate nor a concurrency is given
EXAMPLES = """examples:
  quire bench serve
  quire bench serve --num-prompts 200 --random-input-len 512 --random-output-len 128 --max-concurrency 32
  quire bench serve --url http://HOST:8000 --request-rate 1,2,4,8 --goodput ttft:500 tpot:50"""
SEVERAL_VALUES = ("--goodput", "--header", "--metadata")
"""Flags that take several values, separated by spaces."""


def _split(value: object) -> object:
    """Comma-separated values; a repeated flag adds values."""
    parts = [value] if isinstance(value, str | int | float) else value
    if not isinstance(parts, list):
        return parts
    return [entry.strip() for part in parts for entry in str(part).split(",") if entry.strip()]


def _read_pairs(separator: str) -> BeforeValidator:
    """Reads ``KEY=VALUE``, or such with another separator: one, a list of them, or a list as JSON."""

    def read(value: object) -> object:
        if isinstance(value, str):
            value = json.loads(value) if value.startswith("[") else value.split()
        if not isinstance(value, list):
            return value
        pairs: dict[str, str] = {}
        for entry in value:
            key, found, text = str(entry).partition(separator)
            if not found:
                raise ValueError(f"{entry!r} is not KEY{separator}VALUE.")
            pairs[key.strip()] = text.strip()
        return pairs

    return BeforeValidator(read)


def _read_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"{value!r} is not JSON.") from None


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(_split)]
Pairs = Annotated[dict[str, str], NoDecode, _read_pairs("=")]
Objectives = Annotated[dict[str, float], NoDecode, _read_pairs(":")]
Object = Annotated[dict[str, Any], NoDecode, BeforeValidator(_read_json)]


class ServeBenchConfig(CliSettings):
    """Measures an OpenAI-compatible server: sends requests at their times, and reports latency, throughput and goodput.

    Flags and result keys are named as in "vllm bench serve".
    """

    model_config = SettingsConfigDict(cli_prog_name="quire bench serve", env_prefix="QUIRE_BENCH_")
    metavars: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--header", "--metadata"), "KEY=VALUE"),
        **dict.fromkeys(("--percentile-metrics",), "NAMES"),
        **dict.fromkeys(("--request-rate", "--metric-percentiles"), "NUMBERS"),
        **dict.fromkeys(("--plot", "--dataset-path"), "FILE"),
        **dict.fromkeys(("--tokenizer", "--result-dir"), "FOLDER"),
        "--goodput": "NAME:MS",
        "--extra-body": "JSON",
        "--api-key": "KEY",
        "--base-url": "URL",
    }
    flag_aliases: ClassVar[Mapping[str, Sequence[str]]] = {"--base-url": ("--url",)}
    examples: ClassVar[str | None] = EXAMPLES
    foreign_flags: ClassVar[Mapping[str, str]] = {
        "--served-model-name": "--model is the name that the server knows",
        "--skip-tokenizer-init": "there is no tokenizer unless --tokenizer names one",
        "--endpoint-type": "use --backend",
        "--trust-remote-code": "no code of a tokenizer's folder is run",
        "--tokenizer-mode": "a tokenizer is read from tokenizer.json",
        "--lora-modules": "--model is the name that the server knows an adapter by",
        "--profile": "the server's profiler is not started from here",
        "--disable-tqdm": "NO_COLOR=1 turns the progress line off",
        "--random-batch-size": "only servers that generate are measured",
        "--plot-timeline": "--save-detailed writes the times of every request",
    }

    # The server
    backend: Literal["openai", "vllm", "openai-chat"] = Field(
        default="openai", description="Which API: completions (openai, or vllm), or chat completions."
    )
    base_url: str | None = Field(default=None, description=f"{URL_HELP[0].upper()}{URL_HELP[1:]}.")
    host: str = Field(default="127.0.0.1", description="The server's host, instead of a URL.")
    port: int = Field(default=8000, ge=1, le=65535, description="The server's port, instead of a URL.")
    endpoint: str | None = Field(
        default=None, description="The path; by default /v1/completions or /v1/chat/completions, as the backend has it."
    )
    model: str | None = Field(default=None, description="The model's name there; by default the first of /v1/models.")
    api_key: SecretStr | None = Field(default=None, description=f"Sent as the bearer token; {KEY_HELP}.")
    header: Pairs = Field(default={}, description="Further headers of each request.")
    extra_body: Object = Field(default={}, description="Further fields of each request's body, as a JSON object.")
    insecure: bool = Field(default=False, description="Take any certificate of an HTTPS server.")
    request_timeout: Seconds = Field(
        default=3600.0, ge=0, description="Seconds after which a request has failed; 0 for none."
    )
    ready_check_timeout_sec: Seconds = Field(
        default=0.0, ge=0, description="Seconds to wait for the server to answer at all before anything is sent."
    )

    # The requests
    dataset_name: Literal["random", "sharegpt", "timed_trace"] = Field(
        default="random",
        description="Random prompts, first turns of a ShareGPT file's conversations, or a trace's lengths and times.",
    )
    dataset_path: Path | None = Field(default=None, description="The file of a sharegpt or timed_trace dataset.")
    num_prompts: int = Field(default=1000, ge=1, le=1_000_000, description="Requests of a run.")
    num_warmups: int = Field(default=0, ge=0, le=100_000, description="Requests before it that are not measured.")
    input_len: int | None = Field(default=None, ge=1, description="For --random-input-len.")
    output_len: int | None = Field(default=None, ge=1, description="For the dataset's own output length.")
    random_input_len: int = Field(default=1024, ge=0, description="Tokens of a random prompt, without its prefix.")
    random_output_len: int = Field(default=128, ge=1, description="Tokens of its output.")
    random_range_ratio: str = Field(
        default="0.0",
        description="Both lengths are drawn from this part below to this part above; "
        '{"input": 0.3, "output": 0.5} sets them apart.',
    )
    random_prefix_len: int = Field(default=0, ge=0, description="Tokens that all random prompts begin with alike.")
    sharegpt_output_len: int | None = Field(
        default=None, ge=1, description="Tokens of each output; by default as many as the file's own answer has."
    )
    disable_shuffle: bool = Field(default=False, description="Take a ShareGPT file's conversations in their order.")
    timed_trace_sec_multiplier: float = Field(
        default=1.0,
        gt=0,
        description="Seconds in a unit of the trace's times: 0.001 for milliseconds. Larger replays it slower.",
    )
    timed_trace_chunk_hash_size: int = Field(
        default=16, ge=1, description="Tokens that one of the trace's hash_ids stands for."
    )
    timed_trace_jitter_sec: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Spread the trace's times by up to as many seconds: some traces round them, as to 3 s.",
    )
    self_timed: bool | None = Field(
        default=None, description="Send a trace's requests at its own times, as is the default, or at --request-rate."
    )
    prompts: Literal["ids", "text"] | None = Field(
        default=None, description="Send prompts as token ids, as completions do by default, or as text."
    )
    tokenizer: Path | None = Field(
        default=None, description="A folder with tokenizer.json: for prompts as text, and to count tokens."
    )
    vocab_size: int = Field(
        default=1_000,
        ge=8,
        description="Without a tokenizer, token ids of prompts are below this number, as most models have.",
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Decides prompts, lengths and arrival times.")

    # How they are sampled
    ignore_eos: bool | None = Field(
        default=None, description="Generate to the full length, as is the default for random and timed_trace."
    )
    temperature: float | None = Field(default=None, ge=0, description="Sent with each request if given.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Sent with each request if given.")
    top_k: int | None = Field(default=None, ge=-1, description="Sent with each request if given.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Sent with each request if given.")

    # When they are sent
    request_rate: Numbers = Field(
        default=[inf],
        description="Requests a second, inf for all at once; of several, such as 1,2,4,inf, each is measured.",
    )
    burstiness: float = Field(
        default=1.0,
        gt=0,
        description="Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is more bursty.",
    )
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description=f"Requests that may run at once; {DEFAULT_CONCURRENCY} unless there is a --request-rate.",
    )

    # What is reported
    goodput: Objectives = Field(
        default={},
        description="Objectives in milliseconds, such as ttft:500 tpot:50: goodput counts the requests that meet all.",
    )
    percentile_metrics: Names = Field(
        default=["ttft", "tpot", "itl", "e2el"], description=f"What to report: {', '.join(METRICS)}."
    )
    metric_percentiles: Numbers = Field(default=[50, 90, 99], description="Their percentiles.")
    save_result: bool = Field(default=False, description="Write the figures of each run as JSON.")
    save_detailed: bool = Field(default=False, description="Include the figures of every request.")
    append_result: bool = Field(default=False, description="Add them to the file instead, one line for each run.")
    result_dir: Path | None = Field(default=None, description="Where to; by default the current folder.")
    result_filename: str | None = Field(
        default=None, description="The file; by default LABEL-RATEqps-MODEL-DATE.json. Several rates share one given."
    )
    label: str | None = Field(default=None, description="What the results are called; by default the backend.")
    metadata: Pairs = Field(default={}, description="Further keys of the results.")
    plot: Path | None = Field(
        default=None, description="Draw latency over throughput, with a point for each rate; the suffix is the format."
    )

    @field_validator("request_rate")
    @classmethod
    def _are_rates(cls, rates: list[float]) -> list[float]:
        if not rates or not all(rate > 0 for rate in rates):
            raise ValueError("A rate must be above 0.")
        return rates

    @field_validator("metric_percentiles")
    @classmethod
    def _are_percentiles(cls, percentiles: list[float]) -> list[float]:
        if not all(0 <= percentile <= 100 for percentile in percentiles):
            raise ValueError("A percentile must be from 0 to 100.")
        return percentiles

    @field_validator("percentile_metrics")
    @classmethod
    def _are_metrics(cls, names: list[str]) -> list[str]:
        if unknown := [name for name in names if name not in METRICS]:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(METRICS)}.")
        return names

    @field_validator("goodput")
    @classmethod
    def _are_objectives(cls, objectives: dict[str, float]) -> dict[str, float]:
        if unknown := [name for name in objectives if name not in OBJECTIVES]:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(OBJECTIVES)}.")
        if not all(value >= 0 and isfinite(value) for value in objectives.values()):
            raise ValueError("An objective must be 0 or more milliseconds.")
        return objectives

    @field_validator("random_range_ratio")
    @classmethod
    def _is_a_ratio(cls, text: str) -> str:
        read_range_ratios(text)
        return text

    @model_validator(mode="after")
    def _fit_together(self) -> "ServeBenchConfig":
        if (self.dataset_name == "random") != (self.dataset_path is None):
            raise ValueError("--dataset-path is needed for sharegpt and timed_trace, and means nothing for random.")
        if self.backend == "openai-chat" and self.prompts == "ids":
            raise ValueError("--prompts ids: chat completions take text only.")
        if self.tokenizer is None and self._needs_tokenizer:
            raise ValueError(
                "--tokenizer FOLDER is needed for prompts as text, which chats always are, and for a sharegpt dataset "
                "without --sharegpt-output-len and --prompts text."
            )
        if self.self_timed is not None and self.dataset_name != "timed_trace":
            raise ValueError("--self-timed: only a timed_trace has times.")
        if self.is_self_timed and self.request_rate != [inf]:
            raise ValueError("--request-rate: the trace's own times are used unless --no-self-timed is given.")
        return self

    @property
    def _needs_tokenizer(self) -> bool:
        if self.dataset_name == "sharegpt":
            return self.sharegpt_len is None or not self.sends_text
        return self.sends_text

    @property
    def url(self) -> str:
        """The server's URL, without the endpoint."""
        return base_url(self.base_url or join_host_port(self.host, self.port))

    @property
    def path(self) -> str:
        """The endpoint's path."""
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request, the key included."""
        key = self.api_key.get_secret_value() if self.api_key else key_of_environment(self.url)
        return ({"Authorization": f"Bearer {key}"} if key else {}) | self.header

    @property
    def is_self_timed(self) -> bool:
        """Whether requests are sent at a trace's times."""
        return self.dataset_name == "timed_trace" and self.self_timed is not False

    @property
    def concurrency(self) -> int | None:
        """Requests that may run at once; None for all. Without a flag that says how requests are sent not all are sent
        at once: a router queues a bounded number.
        """
        says_when = self.is_self_timed or "request_rate" in self.model_fields_set
        return self.max_concurrency or (None if says_when else DEFAULT_CONCURRENCY)

    @property
    def sends_text(self) -> bool:
        """Whether prompts are sent as text, not as token ids."""
        return self.backend == "openai-chat" or self.prompts == "text"

    @property
    def sharegpt_len(self) -> int | None:
        """Tokens of each output of a ShareGPT dataset; None for the length of the file's answers."""
        return self.output_len or self.sharegpt_output_len

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of each body."""
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        ignores = self.dataset_name != "sharegpt" if self.ignore_eos is None else self.ignore_eos
        return given | ({"ignore_eos": True} if ignores else {}) | self.extra_body


def read_range_ratios(text: str) -> tuple[float, float]:
    """The range ratios of prompts and outputs. Raises ``ValueError``."""
    try:
        value = json.loads(text)
        ratios = (float(value["input"]), float(value["output"])) if isinstance(value, dict) else (float(value),) * 2
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f'{text!r} is not a number, and not an object such as {{"input": 0.3, "output": 0.5}}.'
        ) from None
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise ValueError("A range ratio must be at least 0 and below 1.")
    return ratios


def join_values(arguments: Iterable[str]) -> list[str]:
    """The arguments with all values of a flag of ``SEVERAL_VALUES``, as in ``--goodput ttft:500 tpot:50``, as one JSON
    list.
    """
    joined: list[str] = []
    values: list[str] | None = None
    for argument in (*arguments, "--"):
        if values is not None and argument.startswith("--"):
            joined.append(json.dumps(values))
            values = None
        if values is not None:
            values.append(argument)
        else:
            joined.append(argument)
            values = [] if argument in SEVERAL_VALUES else None
    return joined[:-1]
