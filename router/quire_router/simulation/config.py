"""The fleet simulator's settings. Engines have the flags and environment variables of the engine's simulator, and the
shared-prefix workload those of SGLang's benchmark.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from quire_engine.config import BlockSize, Names
from quire_engine.simulation.config import SimulatedEngineConfig
from quire_engine.simulation.simulator import NANOSECONDS
from quire_proto import units

from quire_router.admission.queue import QueueSettings
from quire_router.engines.load import CAPACITY_SECONDS
from quire_router.engines.load_sharing import LoadSharingSettings
from quire_router.placement.policies import PlacementSettings, PolicyName
from quire_router.simulation.simulated_fleet import FleetShape
from quire_router.simulation.simulated_router import Delays
from quire_router.simulation.workload import SharedPrefix

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def _numbers(value: object) -> object:
    """Splits numbers that are separated by commas; a repeated flag adds some."""
    parts = value if isinstance(value, list) else [value]
    return [number for part in parts for number in str(part).split(",")]


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[units.Seconds, Field(ge=0, le=1e6)]
Utilisation = Annotated[float, Field(gt=0, le=100)]


class FleetSettings(SimulatedEngineConfig):
    """Simulates engines and the routers before them, with the code that serves, in virtual time.

    The requests are those of a trace, or groups of prompts that begin alike.
    """

    model_config = SettingsConfigDict(cli_prog_name="quire-router simulate")
    metavars: ClassVar[Mapping[str, str]] = {**SimulatedEngineConfig.metavars, "--policies": "NAMES"}

    trace: Path | None = Field(
        default=None, description="Requests: an Azure CSV or a Mooncake JSONL file; by default they are generated."
    )
    start: int = Field(default=0, ge=0, description="First row of the trace that is used.")
    limit: Count | None = Field(default=None, description="Requests that are used; all by default.")
    gsp_num_groups: Count = Field(default=64, description="Generated: groups of prompts that begin alike.")
    gsp_prompts_per_group: Count = Field(default=16, description="Generated: prompts of one group.")
    gsp_system_prompt_len: int = Field(default=2048, ge=0, description="Generated: tokens that a group shares.")
    gsp_question_len: Count = Field(default=128, description="Generated: tokens that a prompt has of its own.")
    gsp_output_len: Count = Field(default=256, description="Generated: tokens of an output.")

    engines: int = Field(default=8, ge=1, le=1024, description="Engines.")
    replicas: int = Field(default=1, ge=1, le=64, description="Routers; each request comes to any of them.")
    policies: Names = Field(
        default=list(POLICIES), description="Placement policies to run side by side, with commas between."
    )
    tenants: int = Field(default=1, ge=1, le=10_000, description="Tenants, which share the requests evenly.")
    flood: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="Run again with this many times the first tenant's requests.",
    )
    utilisation: Annotated[list[Utilisation], NoDecode, BeforeValidator(_numbers)] = Field(
        default=[0.9], description="Work that arrives, as part of what the engines can do with nothing cached."
    )
    share_age: Annotated[float | None, BeforeValidator(lambda value: None if value == "none" else value)] = Field(
        default=LoadSharingSettings().interval,
        ge=0,
        le=1e6,
        description="Seconds between two messages of a router about what it has in flight; none: it sends none.",
    )
    share_delay: Seconds = Field(default=0.002, description="Seconds until the others hear of it.")
    load_age: Seconds = Field(default=0.01, description="Seconds until a router has an engine's report of its load.")
    event_delay: Seconds = Field(default=0.01, description="Seconds until a router knows what an engine caches.")
    admission: bool = Field(default=True, description="Let requests wait at the router while no engine has room.")
    room_seconds: units.Seconds = Field(
        default=CAPACITY_SECONDS, gt=0, description="Seconds of prompts to compute with which an engine still has room."
    )
    max_tokens: Count = Field(default=1024, description="Tokens that every request allows its output to have.")

    block_size: BlockSize = 64

    as_json: bool = Field(default=False, alias="json", description="Print JSON instead of tables.")
    plot: Path | None = Field(default=None, description="Picture to write (needs the extra 'plot').")

    @field_validator("policies")
    @classmethod
    def _are_policies(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in POLICIES]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(POLICIES)}.")
        if not names:
            raise ValueError("At least one is needed.")
        return names

    @model_validator(mode="after")
    def _has_others(self) -> "FleetSettings":
        if self.flood is not None and self.tenants == 1:
            raise ValueError("A flood needs --tenants, of which the first floods the others.")
        return self

    @property
    def placement(self) -> list[PolicyName]:
        """The policies to run, in this order, each once."""
        return [policy for name in dict.fromkeys(self.policies) for policy in POLICIES if policy == name]

    @property
    def shared_prefix(self) -> SharedPrefix:
        """The generated workload."""
        return SharedPrefix(
            self.gsp_num_groups,
            self.gsp_prompts_per_group,
            self.gsp_system_prompt_len,
            self.gsp_question_len,
            self.gsp_output_len,
        )

    def fleet(self, policy: PolicyName) -> FleetShape:
        """Returns the simulated fleet under this policy."""
        interval = None if self.share_age is None else _nanoseconds(self.share_age)
        delays = map(_nanoseconds, (self.share_delay, self.load_age, self.event_delay))
        return FleetShape(
            engines=self.engines,
            replicas=self.replicas,
            delays=Delays(interval, *delays),
            placement=PlacementSettings(policy=policy, seed=self.seed),
            room_seconds=self.room_seconds,
            max_tokens=self.max_tokens,
            queue=QueueSettings() if self.admission else None,
        )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
