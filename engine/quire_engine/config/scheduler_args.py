"""Settings of the scheduler: its limits, its order, preemption and speculation."""

from typing import Self

from pydantic import Field, model_validator
from quire_proto.units import Seconds

from quire_engine.config.cache_args import CacheConfig
from quire_engine.config.capabilities import Feature, find_conflict
from quire_engine.config.fields import (
    Frozen,
    MaxNumSeqs,
    MaxWaiting,
    Policy,
    PreemptionPolicy,
    SpeculativeMethod,
    chosen,
)


class SchedulerArgs(Frozen):
    """The limits and the order of a scheduler.

    ``max_num_seqs`` counts sequences that hold device blocks. Victims beyond ``max_swapped`` are recomputed. A waiting
    request can be overtaken ``max_overtakes`` times: under ``sjf`` by shorter requests, by requests whose adapters are
    in use, and by requests that have room to load blocks from disk.
    """

    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and output together; by default what model and KV memory allow.",
    )
    max_num_seqs: MaxNumSeqs = 64
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, le=1 << 20, description="Most tokens that one step computes."
    )
    max_step_seconds: Seconds | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a step may take while sequences decode; prompts get as many of its tokens as fit. 0 "
        "removes the bound; the default is a multiple of what decoding alone takes.",
    )
    max_waiting: MaxWaiting = 16384
    max_overtakes: int = Field(
        default=64,
        ge=1,
        description="How often later requests may overtake one: shorter ones with --scheduling-policy sjf, those for "
        "adapters that are in use, and those with room to load blocks from disk.",
    )
    max_swapped: int = Field(default=64, ge=0, description="Sequences that may be swapped out at once.")
    preemption_mode: PreemptionPolicy = Field(
        default="auto",
        description="How a sequence is preempted when KV memory runs out: swapped to the host if that has room, or "
        "recomputed; auto takes the cheaper way for each.",
    )
    swap_ahead: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of KV blocks in use above which the blocks of the next victims are copied to the host "
        "ahead of need, while steps compute; 0 turns this off.",
    )
    max_loras: int = Field(
        default=1, ge=1, le=1024, description="Different adapters in one step; requests for others wait."
    )
    scheduling_policy: Policy = Field(
        default="fcfs",
        description="Which request is admitted next: the first to come, the shortest job, or by priority.",
    )
    speculative_method: SpeculativeMethod = Field(
        default="none",
        description="Guess next tokens where text repeats, as long as it pays: ngram from the last place with the "
        "same tokens, suffix from all of them. Steps do not overlap then.",
    )
    num_speculative_tokens: int = Field(
        default=10, ge=1, le=64, description="Most tokens to guess for a sequence in one step."
    )
    prompt_lookup_min: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Fewest last tokens that must occur earlier, for --speculative-method ngram.",
    )
    prompt_lookup_max: int = Field(
        default=16, ge=1, le=64, description="Most last tokens that are compared, for --speculative-method ngram."
    )

    @model_validator(mode="after")
    def _lookup_is_a_range(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("--prompt-lookup-min is above --prompt-lookup-max.")
        return self

    @property
    def features(self) -> frozenset[Feature]:
        """See ``Frozen.features``."""
        return super().features | chosen(
            {
                Feature.SPECULATION: self.speculative_method != "none",
                Feature.MAX_SWAPPED: self.max_swapped,
                Feature.SWAP_AHEAD: self.swap_ahead,
                Feature.SWAP_ONLY: self.preemption_mode == "swap",
                Feature.RECOMPUTE_ONLY: self.preemption_mode == "recompute",
            }
        )


class CoreArgs(CacheConfig, SchedulerArgs):
    """Settings of an engine's core, with a model or a simulated executor."""

    @model_validator(mode="after")
    def _features_go_together(self) -> Self:
        conflict = find_conflict(self.features)
        if conflict is not None:
            raise ValueError(conflict)
        return self
