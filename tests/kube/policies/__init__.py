"""What every release of the chart obeys, whatever its values. A policy takes a release and yields a sentence for each
breach.
"""

from collections.abc import Callable, Iterator

from tests.kube.helm import Release
from tests.kube.policies import access, lifetime, network, wiring
from tests.kube.policies import pods as of_pods

Policy = Callable[[Release], Iterator[str]]

POLICIES: tuple[Policy, ...] = (
    of_pods.images_do_not_float,
    of_pods.resources_are_set,
    of_pods.last_words_are_kept,
    of_pods.nothing_runs_as_root,
    of_pods.containers_have_no_rights,
    of_pods.pods_share_nothing_with_the_node,
    of_pods.temporary_folders_are_bounded,
    of_pods.disk_is_requested,
    of_pods.mounts_and_volumes_agree,
    of_pods.variables_are_there_once,
    of_pods.only_the_router_speaks_to_kubernetes,
    access.roles_allow_only_what_is_listed,
    access.bindings_name_what_is_there,
    access.secrets_stay_in_secrets,
    access.generated_secrets_are_no_constants,
    network.everything_is_denied_first,
    network.only_the_api_is_open_to_all,
    network.needed_paths_are_open,
    network.redis_and_engines_keep_to_themselves,
    network.policies_name_ports_that_are_there,
    lifetime.probes_mean_three_things,
    lifetime.engines_may_take_long_to_start,
    lifetime.a_late_answer_restarts_no_pod,
    lifetime.pods_end_after_their_drain,
    lifetime.budgets_protect_and_let_go,
    lifetime.several_replicas_have_a_budget,
    lifetime.one_owner_of_replicas,
    lifetime.updates_take_nothing_away,
    wiring.selectors_never_change,
    wiring.services_reach_their_pods,
    wiring.routes_lead_to_services,
    wiring.monitors_find_what_they_watch,
    wiring.autoscalers_speak_tls_where_others_do,
    wiring.what_pods_mount_is_there,
    wiring.every_object_says_whose_it_is,
    wiring.names_fit,
    wiring.keys_are_text,
    wiring.changed_configuration_restarts_pods,
)
