"""The benchmark's settings: the engine's own, and what is measured beside whom."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from quire_engine.bench.lengths import DISTRIBUTIONS
from quire_engine.bench.measure import Measured
from quire_engine.bench.workload import SHAPES, Lengths
from quire_engine.config import EngineConfig, ModelFolder, Names

PEERS = (
    "transformers",
    "transformers-serial",
    "transformers-cb",
    "vllm",
    "llama.cpp",
    "llama.cpp-q4_k_m",
    "llama.cpp-q8_0",
)
# Peers in fewer bits, each with the variant of the engine beside which it is measured.
QUANTIZED_PEERS: Mapping[str, str] = {"llama.cpp-q4_k_m": "int4", "llama.cpp-q8_0": "int8"}
SERVED = "served"  # the figures of a server under load, beside those of ``Figure``
# What the engine can be measured with beside its own settings.
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-kv": {"kv_cache_dtype": "int8"},
    "deterministic": {"deterministic": True},
    "eager": {"enforce_eager": True},
    "async": {"async_scheduling": True},
    "static": {},  # these two differ in their step policies, which are the simulator's
    "phased": {},
}
FIGURES: tuple[Measured, ...] = get_args(Measured)
Range = Annotated[str, BeforeValidator(lambda value: str(Lengths.of(str(value))))]


class BenchConfig(EngineConfig):
    """Measures the engine, and peers that are installed, on the same requests in one run. The engine's own flags mean
    what they mean for serving; those that only a server needs have no effect.
    """

    model_config = SettingsConfigDict(cli_prog_name="quire-engine bench")
    metavars: ClassVar[Mapping[str, str]] = {
        **EngineConfig.metavars,
        **dict.fromkeys(("--against", "--also", "--measure"), "NAMES"),
        **dict.fromkeys(("--input-len", "--output-len"), "N"),
        "--lengths": "LENGTHS",
        "--shape": "SHAPE",
    }

    model: ModelFolder = Path()
    shape: str | None = Field(
        default=None,
        description=f"Random weights of a shape instead: {', '.join(SHAPES)}, a config.json, or the text of one.",
    )
    against: Names = Field(
        default=["auto"],
        description=f"Peers to compare with: {', '.join(PEERS)}; auto for those that are installed, none for none.",
    )
    also: Names = Field(
        default=[], description=f"The engine once more, with another setting each: {', '.join(VARIANTS)}."
    )
    vllm_python: Path | None = Field(
        default=None, description="The interpreter of vLLM's environment; by default ours, or .peers/vllm."
    )
    llama_python: Path | None = Field(
        default=None, description="The interpreter of llama-cpp-python's environment; by default ours, or .peers/llama."
    )
    measure: Names = Field(
        default=list(FIGURES),
        description=f"What to measure: {', '.join(FIGURES)}, and {SERVED} for servers under load.",
    )
    num_prompts: int = Field(default=32, ge=1, le=65536, description="Requests of the throughput measurement.")
    input_len: Range = Field(default="128", description="Tokens of each of its prompts, one number or 100..1024.")
    output_len: Range = Field(default="64", description="Tokens of each of its outputs, likewise.")
    lengths: str | None = Field(
        default=None,
        description=f"Lengths of both instead: {', '.join(DISTRIBUTIONS)}, a range, or a trace file of "
        "quire-engine simulate.",
    )
    num_outputs: int = Field(default=1, ge=1, le=64, description="Outputs of each of its prompts; several are sampled.")
    latency_input_len: int = Field(default=128, ge=1, description="Prompt of the single stream, in tokens.")
    latency_output_len: int = Field(default=128, ge=2, description="Output of the single stream, in tokens.")
    prefill_len: int = Field(default=2048, ge=1, description="Prompt of the prefill measurement, in tokens.")
    num_served_prompts: int = Field(
        default=96,
        ge=1,
        le=65536,
        description="Requests of a run of the served measurement; as many at once as --num-prompts says.",
    )
    rounds: int = Field(default=5, ge=1, le=1000, description="How often everything is measured; medians are reported.")
    warm_up_output_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of an output in the run of each system before the first round; by default all.",
    )
    in_turn: bool | None = Field(
        default=None,
        description="Load all systems at once and let each round run them in turn; by default on the CPU. Otherwise "
        "one system after the other is loaded, measured and ended.",
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Decides the prompts, the lengths and random weights.")
    json_path: Path | None = Field(default=None, alias="json", description="Also write all figures here.")

    @field_validator("against", "also")
    @classmethod
    def _are_known(cls, names: list[str], info: ValidationInfo) -> list[str]:
        known = (*PEERS, "auto", "none") if info.field_name == "against" else tuple(VARIANTS)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(known)}.")
        return names

    @field_validator("measure")
    @classmethod
    def _are_figures(cls, names: list[str]) -> list[str]:
        known = (*FIGURES, SERVED)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ValueError(f"{', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}.")
        return names

    @model_validator(mode="after")
    def _servers_have_lengths_of_their_own(self) -> "BenchConfig":
        if SERVED in self.measure and (self.lengths is not None or self.num_outputs > 1):
            raise ValueError(
                f"--measure {SERVED} takes --input-len and --output-len, without --lengths and --num-outputs."
            )
        return self

    @model_validator(mode="after")
    def _static_batches_are_several(self) -> "BenchConfig":
        num_sequences = self.num_outputs * self.num_prompts
        most = self.max_num_seqs if "max_num_seqs" in self.model_fields_set else num_sequences
        if "static" in self.also and most >= num_sequences:
            raise ValueError("--also static needs --max-num-seqs below --num-prompts: one batch is as fast either way.")
        return self

    @model_validator(mode="after")
    def _has_a_model(self) -> "BenchConfig":
        if (self.shape is None) == (self.model == Path()):
            raise ValueError("Give either --model or --shape.")
        return self

    @field_validator("lengths")
    @classmethod
    def _are_lengths(cls, lengths: str | None) -> str | None:
        if lengths is None or lengths in DISTRIBUTIONS or Path(lengths).is_file():
            return lengths
        try:
            return str(Lengths.of(lengths))
        except ValueError:
            raise ValueError(f"{lengths} is not {', '.join(DISTRIBUTIONS)}, a range or a file.") from None

    @property
    def ranges(self) -> tuple[Lengths, Lengths] | None:
        """The ranges of prompts and of outputs; None if their lengths are those of a distribution or a trace."""
        if self.lengths is None:
            return Lengths.of(self.input_len), Lengths.of(self.output_len)
        is_range = self.lengths not in DISTRIBUTIONS and not Path(self.lengths).is_file()
        return (Lengths.of(self.lengths), Lengths.of(self.lengths)) if is_range else None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output; without those whose lengths are no ranges."""
        throughput = sum(lengths.most for lengths in self.ranges or ())
        return max(throughput, self.latency_input_len + self.latency_output_len, self.prefill_len + 1)
