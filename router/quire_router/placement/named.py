"""Policies by name."""

from collections.abc import Callable, Mapping

from quire_router.placement.cost import Cost
from quire_router.placement.policies import LeastLoad, LlmD, PowerOfTwo, PrefixOnly, RoundRobin, SgLang
from quire_router.placement.policy import Policy
from quire_router.placement.scorers import make_scorers
from quire_router.placement.settings import PlacementSettings, PolicyName

_MAKERS: Mapping[PolicyName, Callable[[PlacementSettings], Policy]] = {
    "cost": lambda settings: Cost(make_scorers(settings)),
    "round_robin": lambda _: RoundRobin(),
    "least_load": lambda _: LeastLoad(),
    "prefix_only": lambda _: PrefixOnly(),
    "power_of_two": lambda settings: PowerOfTwo(settings.seed),
    "llm_d": lambda _: LlmD(),
    "sglang": lambda _: SgLang(),
}


def make_policy(settings: PlacementSettings) -> Policy:
    """A new policy of the settings' name."""
    return _MAKERS[settings.policy](settings)
