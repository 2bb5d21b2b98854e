"""The alert rules ask for what there is, lead to a page that says what to do, and fire when they should, only then."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping

import pytest
import yaml

from tests.support import queries
from tests.support.pages import ROOT

RULES = sorted((ROOT / "charts" / "quire" / "files" / "rules").glob("*.yaml"))
GUIDE = ROOT / "docs" / "alerts.md"
# scripts/promtool.sh puts it beside the environment's own programs.
PROMTOOL = shutil.which("promtool", path=os.pathsep.join((str(ROOT / ".venv" / "bin"), os.environ.get("PATH", ""))))
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: scripts/promtool.sh fetches it")

NAMESPACE = 'namespace="n"'
ROUTER = f'{NAMESPACE}, job="router"'
ENGINE = f'{NAMESPACE}, job="engine", pod="e"'
CONTAINER = f'{NAMESPACE}, pod="e", container="engine"'
MODEL = f'{ROUTER}, pod="r1", model="m"'
# Of another release, and of somebody else's.
SECOND = f'{NAMESPACE}, job="second", pod="s1"'
FOREIGN = 'namespace="others", pod="x", container="redis"'
# An hour of a fleet that is well, minute by minute: two routers, one engine, a little of everything; beside it, in the
# same namespace, a release with one router and without Redis.
HEALTHY: Mapping[str, str] = {
    f"quire_engines_ready{{{MODEL}}}": "1x60",
    f"quire_in_flight_requests{{{MODEL}}}": "3x60",
    f'quire_discovery_connected{{{ROUTER}, pod="r1", source="kubernetes"}}': "1x60",
    f'quire_requests_total{{{MODEL}, finish_reason="stop"}}': "0+100x60",
    f'quire_requests_total{{{MODEL}, finish_reason="error"}}': "0+1x60",
    f'quire_admission_refusals_total{{{ROUTER}, pod="r1", reason="none_ready"}}': "4x60",
    f'quire_admission_refusals_total{{{ROUTER}, pod="r1", reason="queue_full"}}': "4x60",
    f'quire_admission_refusals_total{{{ROUTER}, pod="r1", reason="requests_per_minute"}}': "0+9x60",
    f'quire_rejections_total{{{ROUTER}, pod="r1", reason="invalid"}}': "0+9x60",
    f'quire_rejections_total{{{ROUTER}, pod="r1", reason="internal"}}': "1x60",
    f'quire_rejections_total{{{ROUTER}, pod="r1", reason="overloaded"}}': "4x60",
    f'quire_time_to_first_token_seconds_bucket{{{MODEL}, le="1"}}': "0+100x60",
    f'quire_time_to_first_token_seconds_bucket{{{MODEL}, le="60"}}': "0+101x60",
    f'quire_time_to_first_token_seconds_bucket{{{MODEL}, le="+Inf"}}': "0+101x60",
    f'quire_queue_seconds_bucket{{{MODEL}, le="10"}}': "0+20x60",
    f'quire_queue_seconds_bucket{{{MODEL}, le="60"}}': "0+20x60",
    f'quire_queue_seconds_bucket{{{MODEL}, le="+Inf"}}': "0+20x60",
    **{f'quire_journal_available{{{ROUTER}, pod="{pod}"}}': "1x60" for pod in ("r1", "r2")},
    **{f'quire_journal_pending_requests{{{ROUTER}, pod="{pod}"}}': "40x60" for pod in ("r1", "r2")},
    **{f'quire_load_routers{{{ROUTER}, pod="{pod}"}}': "1x60" for pod in ("r1", "r2")},
    **{f'quire_limits_shared{{{ROUTER}, pod="{pod}"}}': "1x60" for pod in ("r1", "r2")},
    f'quire_journal_dropped_writes_total{{{ROUTER}, pod="r1"}}': "2x60",
    f'quire_stale_epoch_rejections_total{{{ROUTER}, pod="r1"}}': "3x60",
    f'quire_index_dropped_blocks_total{{{ROUTER}, pod="r1", reason="full"}}': "3x60",
    f'quire_index_dropped_blocks_total{{{ROUTER}, pod="r1", reason="damaged"}}': "2x60",
    f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="engine_lost"}}': "1x60",
    f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="engine_full"}}': "0+1x60",
    f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="engine_leaving"}}': "0+1x60",
    f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="drain_exceeded"}}': "1x60",
    f'quire_engine_blocks{{{ENGINE}, model="m", tier="device"}}': "900x60",
    f'quire_engine_heartbeat_age_seconds{{{ENGINE}, model="m"}}': "0.2x60",
    f'quire_engine_out_of_memory_requests_total{{{ENGINE}, model="m"}}': "2x60",
    f'quire_engine_preemptions_total{{{ENGINE}, model="m", mode="swap", reason="cheaper"}}': "0+6x60",
    f'quire_engine_unreachable_blocks{{{ENGINE}, model="m"}}': "0x60",
    'aggregator_unavailable_apiservice{name="v1beta1.external.metrics.k8s.io"}': "0x60",
    'aggregator_unavailable_apiservice{name="v1beta1.metrics.k8s.io"}': "1x60",
    'certmanager_certificate_expiration_timestamp_seconds{namespace="n", name="quire-tls"}': "9000000x60",
    'certmanager_certificate_expiration_timestamp_seconds{namespace="n", name="acquire-tls"}': "3600x60",
    f'kube_pod_container_status_last_terminated_reason{{{CONTAINER}, reason="OOMKilled"}}': "1x60",
    f"kube_pod_container_status_restarts_total{{{CONTAINER}}}": "1x60",
    f'kube_pod_container_status_last_terminated_reason{{{FOREIGN}, reason="OOMKilled"}}': "1x60",
    f"kube_pod_container_status_restarts_total{{{FOREIGN}}}": "1+1x60",
    f'quire_engines_ready{{{SECOND}, model="m"}}': "1x60",
    f'quire_in_flight_requests{{{SECOND}, model="m"}}': "3x60",
    f"quire_journal_available{{{SECOND}}}": "1x60",
    f"quire_load_routers{{{SECOND}}}": "0x60",
    f"quire_limits_shared{{{SECOND}}}": "0x60",
}
# A release that is installed in minute 5 and that nobody asks for anything. Its routers are there before Redis, and its
# engine loads its model for five minutes.
FRESH: Mapping[str, str] = {
    f"quire_engines_ready{{{MODEL}}}": "_x5 0x5 1x49",
    f"quire_in_flight_requests{{{MODEL}}}": "_x5 0x54",
    f'quire_discovery_connected{{{ROUTER}, pod="r1", source="kubernetes"}}': "_x5 0 1x53",
    f'quire_admission_refusals_total{{{ROUTER}, pod="r1", reason="none_ready"}}': "_x5 0x54",
    f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="engine_lost"}}': "_x5 0x54",
    f'quire_rejections_total{{{ROUTER}, pod="r1", reason="internal"}}': "_x5 0x54",
    **{f'quire_journal_available{{{ROUTER}, pod="{pod}"}}': "_x5 0 1x53" for pod in ("r1", "r2")},
    **{f'quire_load_routers{{{ROUTER}, pod="{pod}"}}': "_x5 0 1x53" for pod in ("r1", "r2")},
    **{f'quire_limits_shared{{{ROUTER}, pod="{pod}"}}': "_x5 0 1x53" for pod in ("r1", "r2")},
    f'quire_engine_blocks{{{ENGINE}, model="m", tier="device"}}': "_x11 900x48",
    f'quire_engine_heartbeat_age_seconds{{{ENGINE}, model="m"}}': "_x11 0x48",
    'aggregator_unavailable_apiservice{name="v1beta1.external.metrics.k8s.io"}': "_x5 1 0x53",
}
# What goes wrong after a while, by the beginning of the series it shows in; each is the whole of what then fires.
TROUBLES: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("QuireNoEngine",): {f"quire_engines_ready{{{MODEL}": "1x20 0x40"},
    (): {"quire_engines_ready": "1x20 0x40", "quire_in_flight_requests": "0x60"},  # it sleeps, and nobody asks
    ("QuireRequestsRefused",): {f'quire_admission_refusals_total{{{ROUTER}, pod="r1", reason="none_ready"}}': "0+2x60"},
    ("QuireErrors",): {f'quire_requests_total{{{MODEL}, finish_reason="error"}}': "0+10x60"},
    ("QuireErrors", "QuireErrorsCritical"): {f'quire_requests_total{{{MODEL}, finish_reason="error"}}': "0+50x60"},
    ("QuireInternalErrors",): {f'quire_rejections_total{{{ROUTER}, pod="r1", reason="internal"}}': "0+1x60"},
    ("QuireSlowFirstToken",): {f'quire_time_to_first_token_seconds_bucket{{{MODEL}, le="1"}}': "0+80x60"},
    ("QuireLongQueue",): {f'quire_queue_seconds_bucket{{{MODEL}, le="10"}}': "0+5x60"},
    ("QuireFull",): {f'quire_admission_refusals_total{{{ROUTER}, pod="r1", reason="queue_full"}}': "0+2x60"},
    ("QuireFull", "QuireInternalErrors"): {
        f'quire_rejections_total{{{ROUTER}, pod="r1", reason="internal"}}': "0+1x60",
        f'quire_rejections_total{{{ROUTER}, pod="r1", reason="overloaded"}}': "0+1x60",
    },
    ("QuireMetricsAbsent",): {f"quire_engines_ready{{{MODEL}": "1x10"},
    ("QuireDiscoveryLost",): {"quire_discovery_connected": "1x30 0x30"},
    ("QuireRedisAway",): {f'quire_journal_available{{{ROUTER}, pod="r2"}}': "1x30 0x30"},
    ("QuireStateDropped",): {"quire_journal_dropped_writes_total": "2x50 2+1x10"},
    ("QuireWritesFallBehind",): {f'quire_journal_pending_requests{{{ROUTER}, pod="r2"}}': "6000x60"},
    ("QuireOwnersChange",): {"quire_stale_epoch_rejections_total": "0+2x60"},
    ("QuireRoutersApart",): {f'quire_load_routers{{{ROUTER}, pod="r2"}}': "1x30 0x30"},
    ("QuireLimitsApart",): {f'quire_limits_shared{{{ROUTER}, pod="r2"}}': "1x30 0x30"},
    ("QuireIndexFull",): {f'quire_index_dropped_blocks_total{{{ROUTER}, pod="r1", reason="full"}}': "0+3x60"},
    ("QuireIndexDamaged",): {f'quire_index_dropped_blocks_total{{{ROUTER}, pod="r1", reason="damaged"}}': "0+3x60"},
    ("QuireEngineStuck",): {"quire_engine_heartbeat_age_seconds": "0x55 40x5"},
    ("QuireEngineLost",): {f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="engine_lost"}}': "0x50 5x10"},
    ("QuireDrainExceeded",): {f'quire_attempts_lost_total{{{ROUTER}, pod="r1", reason="drain_exceeded"}}': "1x50 2x10"},
    ("QuireEngineMetricsAbsent",): {"quire_engine_blocks": "900x30"},
    ("QuireEngineOutOfMemory",): {"quire_engine_out_of_memory_requests_total": "2x50 3x10"},
    ("QuireEnginePreempts",): {"quire_engine_preemptions_total": "0+120x60"},
    ("QuireBlocksLost",): {"quire_engine_unreachable_blocks": "0x40 2x20"},
    ("QuireScalingUnavailable",): {'aggregator_unavailable_apiservice{name="v1beta1.external': "0x30 1x30"},
    ("QuireCertificateExpires",): {
        'certmanager_certificate_expiration_timestamp_seconds{namespace="n", name="quire-tls"}': "9000000x0 500000x59"
    },
    ("QuireKilledForMemory",): {f"kube_pod_container_status_restarts_total{{{CONTAINER}": "1x50 2x10"},
}


def rules() -> list[dict]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9-]", "", heading.lower().replace(" ", "-"))


def after(trouble: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The healthy series, but for those in which trouble shows."""
    for series, values in HEALTHY.items():
        yield series, next((changed for begin, changed in trouble.items() if series.startswith(begin)), values)


def scenario(series: Mapping[str, str], alerts: Iterable[str], minutes: Iterable[int] = (59,)) -> dict:
    """A test of promtool's: these alerts, as their labels, fire at the end of the hour, or at each of ``minutes``, and
    no others.
    """
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname, namespace) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f"{{{labels}}}", "value": 1} for labels in alerts],
            }
            for minute in minutes
        ],
    }


def troubles() -> Iterator[dict]:
    """One test with all troubles that a namespace can have, each in one of its own, as promtool takes long for each
    test; and one for each that the whole cluster has.
    """
    series, fire = {}, []
    for number, (alerts, trouble) in enumerate(TROUBLES.items()):
        if not all(NAMESPACE in name for name, values in after(trouble) if HEALTHY[name] != values):
            yield scenario(dict(after(trouble)), [f'alertname="{alert}"' for alert in alerts])
            continue
        own = f'namespace="n{number}"'
        series |= {name.replace(NAMESPACE, own): values for name, values in after(trouble) if NAMESPACE in name}
        fire += [f'alertname="{alert}", {own}' for alert in alerts]
    yield scenario(series, fire)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_queries_existing_metrics(rule):
    assert not list(queries.complaints(rule["expr"]))


def test_each_alert_has_one_section_in_the_guide_and_a_severity():
    alerts = [rule["alert"] for rule in rules()]
    headings = re.findall(r"^## (Quire\w+)$", GUIDE.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts)
    assert len(set(alerts)) == len(alerts)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{anchor(rule['alert'])}"
        assert rule["annotations"]["summary"].endswith(".")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rules_annotations_use_labels_that_it_keeps(rule):
    named = set(re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values())))
    assert named <= queries.grouped(rule["expr"])


def test_every_alert_has_a_test():
    assert {alert for alerts in TROUBLES for alert in alerts} == {rule["alert"] for rule in rules()}
    for trouble in TROUBLES.values():
        for begin in trouble:
            assert any(series.startswith(begin) for series in HEALTHY), begin


@needs_promtool
def test_alerts_fire_in_trouble_and_only_then(tmp_path):
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", *RULES], check=True, capture_output=True, timeout=60)
    tests = [*(scenario(series, (), range(1, 60)) for series in (HEALTHY, FRESH)), *troubles()]
    plan = tmp_path / "alerts.yaml"
    plan.write_text(
        yaml.safe_dump({"rule_files": [str(path) for path in RULES], "evaluation_interval": "1m", "tests": tests})
    )
    result = subprocess.run([PROMTOOL, "test", "rules", plan], check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
