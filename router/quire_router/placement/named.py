"""Policies by name."""

from collections.abc import Callable, Mapping

from quire_router.placement.cost import CostPolicy
from quire_router.placement.policies import LeastLoad, LlmD, PowerOfTwo, PrefixOnly, RoundRobin, SgLang
from quire_router.placement.policy import PlacementPolicy
from quire_router.placement.scorers import make_scorers
from quire_router.placement.settings import PlacementSettings, PolicyName

_MAKERS: Mapping[PolicyName, Callable[[PlacementSettings], PlacementPolicy]] = {
    "cost": lambda settings: CostPolicy(make_scorers(settings)),
    "round_robin": lambda _: RoundRobin(),
    "least_load": lambda _: LeastLoad(),
    "prefix_only": lambda _: PrefixOnly(),
    "power_of_two": lambda settings: PowerOfTwo(settings.seed),
    "llm_d": lambda _: LlmD(),
    "sglang": lambda _: SgLang(),
}


def make_policy(settings: PlacementSettings) -> PlacementPolicy:
    """A new policy of the settings' name."""
    return _MAKERS[settings.policy](settings)
