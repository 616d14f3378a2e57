"""What operators start with: every figure that a dashboard or an alert names is exported, and every setting exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from cloister.engine.replica_snapshot import ReplicaSnapshot, ReplicaState
from cloister.launch import resolve_settings
from cloister.policy.counts import CountRelease
from cloister.private.workers.metrics import Figures
from cloister.server.metrics import EngineGauges, Metrics, ReleasedCounts
from cloister.types.config import EngineConfig, ServerConfig, setting_names
from cloister.types.events import Drafting, Ended, Stepped
from cloister.types.request import FinishReason
from tests.server.running_server import ScriptedEngine, says

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/cloister.json").read_text())
RULES = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


class TwoReplicas(ScriptedEngine):
    """The client of two replicas, which have series of their own."""

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [ReplicaSnapshot(0), ReplicaSnapshot(1)]


def samples() -> Iterator[tuple[str, dict[str, str]]]:
    """Every series that a server has: its name and labels."""
    engine = TwoReplicas(says("x"))
    engine.memory, engine.startup = [("weights", 1)], [("import", 1.0)]
    metrics = Metrics(EngineGauges(engine, "m"))
    metrics.count_reply("/v1/models", 200)
    metrics.observe(Stepped(1.0, 0.1, 1, 1, 1, 0, 1, 0, 8, drafting=(Drafting("ngram", 1, (1,), (1,), 0.01),)))
    for family in metrics.collect():
        for sample in family.samples:
            yield sample.name, sample.labels


def exported() -> dict[str, set[str]]:
    """The labels of every series of a server, by its name."""
    found: dict[str, set[str]] = {}
    for name, labels in samples():
        found.setdefault(name, set()).update(labels)
    return found


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_figure_and_label_that_is_asked_for_is_exported(expression):
    series = exported()
    names = re.findall(r"\bcloister_\w+", expression)
    assert names or expression.startswith("up{")
    for name in names:
        assert name in series
    known = set().union(*(series.get(name, set()) for name in names)) | {"instance", "job"}
    asked = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression) + re.findall(r"\bby \(([^)]*)\)", expression)
    assert {label.strip() for group in asked for label in group.split(",")} <= known


def test_the_dashboard_is_what_its_source_writes():
    written = subprocess.run(
        [sys.executable, DEPLOY / "grafana/make_dashboard.py"], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(written) == DASHBOARD, "run deploy/grafana/make_dashboard.py again"


def test_panels_have_numbers_and_places_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_figures_that_vllm_users_know_are_all_on_the_dashboard():
    shown = " ".join(QUERIES)
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
        "request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "prefix_cache_hits_total", "prefix_cache_queries_total",
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
    ):  # fmt: skip
        assert f"cloister_{name}" in shown


def test_every_alert_says_what_and_what_to_do():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def promtool(*arguments: str, folder: Path = PROMETHEUS) -> None:
    ended = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


ALERT_TESTS = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]


def test_every_alert_fires_in_a_test_and_spares_an_instance_or_a_moment():
    """`promtool test rules` fails where an alert fires that a test does not expect."""
    fires, spares = set(), set()
    for test in ALERT_TESTS:
        instances = {re.search(r'instance="(\w+)"', given["series"])[1] for given in test["input_series"]}
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else spares).add(case["alertname"])
            if {alert["exp_labels"]["instance"] for alert in case["exp_alerts"]} < instances:
                spares.add(case["alertname"])
    assert fires == spares == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("series", sorted({given["series"] for test in ALERT_TESTS for given in test["input_series"]}))
def test_what_alerts_are_tested_with_is_what_a_server_exports(series):
    """The same name, the same labels, and of labels with fixed values one of these; `instance` and `job` are of Prometheus."""
    name = series.partition("{")[0]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
    if name == "up":
        assert set(labels) == {"job", "instance"}
        return
    del labels["instance"]
    known = [real for exported_name, real in samples() if exported_name == name]
    assert known
    assert all(set(real) == set(labels) for real in known)
    for label in labels.keys() & {"le", "finished_reason"}:
        assert labels[label] in {real[label] for real in known}
    if name == "cloister_replica_state":
        assert labels["state"] in get_args(ReplicaState)


def test_the_head_of_the_rules_names_those_that_can_fire_under_strict_profiles():
    """An expression of which a series is missing never fires."""

    def can_fire(text: str) -> set[str]:
        names = set(re.findall(r"^(cloister_\w+)", text, re.MULTILINE)) | {"up"}
        return {rule["alert"] for rule in RULES if set(re.findall(r"\b(?:cloister_\w+|up)\b", rule["expr"])) <= names}

    counts = ReleasedCounts(CountRelease(threshold=2))
    assert can_fire(counts.render().decode()) == {"CloisterDown"}  # until requests have ended
    for name in ("a", "b"):
        counts.observe(Ended(name, 1, 0, 1.0, FinishReason.STOP, 3, 2, 0, 0.0, 0.5, last=True))
    of_a_server = can_fire(counts.render().decode())
    of_a_node = can_fire(Figures().render(is_healthy=True).decode())
    assert (of_a_server, of_a_node) == ({"CloisterDown", "CloisterPreempts"}, {"CloisterDown", "CloisterEngineUnhealthy"})
    head = (PROMETHEUS / "alerts.yml").read_text().partition("groups:")[0].partition("Of a sealed node")
    assert [set(re.findall(r"Cloister\w+", part)) for part in (head[0], head[2])] == [of_a_server, of_a_node]


def test_replicas_are_named_by_an_alert_and_on_the_dashboard():
    assert any("cloister_replica_state" in rule["expr"] for rule in RULES)
    assert any("cloister_replica_state" in query for query in QUERIES)


def test_restarts_of_each_replica_are_alerted_on_and_shown():
    (rule,) = (rule for rule in RULES if rule["alert"] == "CloisterEngineRestarts")
    assert "cloister_replica_restarts_total" in rule["expr"]
    assert any("cloister_replica_restarts_total" in query for query in QUERIES)


@needs_promtool
def test_prometheus_takes_its_config_and_the_rules_fire_when_they_should():
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_prometheus_understands_every_query_of_the_dashboard(tmp_path):
    def filled() -> Iterator[str]:
        for query in QUERIES:
            yield query.replace("$__rate_interval", "1m").replace("$instance", ".*")

    rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(filled())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", folder=tmp_path)


@needs_promtool
def test_prometheus_reads_what_a_server_exports(tmp_path):
    engine = ScriptedEngine(says("x"))
    engine.memory, engine.startup = [("weights", 1)], [("import", 1.0)]
    text = Metrics(EngineGauges(engine, "m")).render()
    ended = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    complaints = [line for line in ended.stderr.decode().splitlines() if not any(known in line for known in KEPT_NAMES)]
    assert complaints == []


KEPT_NAMES = ("cloister_model_info",)
"""Against promtool's taste: an info metric is a gauge in this format."""


def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    text = (DEPLOY / "systemd/cloister.service").read_text()
    path = tmp_path / "cloister.service"
    path.write_text(text.replace("/opt/cloister/bin/cloister serve", f"{sys.executable} -m cloister.cli serve"))
    return path


@needs_systemd
def test_systemd_takes_the_unit_and_finds_it_well_hardened(tmp_path):
    path = unit(tmp_path)
    verified = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", path], capture_output=True, text=True, check=False
    )
    assert rated.returncode == 0, rated.stdout


def test_the_unit_starts_the_server_with_settings_that_exist():
    text = (DEPLOY / "systemd/cloister.service").read_text()
    assert "ExecStart=/opt/cloister/bin/cloister serve --config /etc/cloister/config.toml" in text
    path = DEPLOY / "systemd/config.toml"
    settings = resolve_settings(config_file=path)
    assert settings.server.config.log_format == "json"
    commented = tomllib.loads("\n".join(re.findall(r"^# (\w+ = .*)$", path.read_text(), re.MULTILINE)))
    assert {"host", "api_keys", "certfile", "keyfile"} <= set(commented)
    assert set(commented) <= set(setting_names(EngineConfig, ServerConfig))


WITHOUT_WRITABLE_CODE = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
    sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_the_server_computes_where_no_memory_may_be_writable_and_executable():
    """As MemoryDenyWriteExecute= of the unit has it."""
    run = ["-m", "cloister.cli", "run", "cloister-5m", "The king", "--max-tokens", "4", "--weights-cache", ""]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_WRITABLE_CODE, *run], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    if ended.returncode == 77:
        pytest.skip("this kernel cannot refuse it")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


def test_compose_mounts_what_is_there_and_opens_nothing_to_the_network():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"cloister", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).is_dir() if source.startswith(".") else source in compose["volumes"]
    assert (DEPLOY / services["cloister"]["build"]["context"] / "Dockerfile").is_file()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, []),
        ({"REPLICAS": "2"}, ["--replicas", "2"]),
        ({"MAX_REPLICAS": "4"}, ["--min-replicas", "1", "--max-replicas", "4"]),
        ({"MIN_REPLICAS": "0", "MAX_REPLICAS": "4"}, ["--min-replicas", "0", "--max-replicas", "4"]),
    ],
)
def test_compose_gives_the_server_its_replicas(variables, wanted):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    command = compose["services"]["cloister"]["command"]  # Compose replaces variables and splits words as a shell does
    script, environment = f"printf '%s\\n' {command}", {**variables, "MODEL": "a model"}
    printed = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    verb, *arguments = printed.splitlines()
    assert (verb, arguments[-len(wanted) :] if wanted else []) == ("serve", wanted)
    assert arguments[arguments.index("--model") + 1] == "a model"
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    resolve_settings({flag.removeprefix("--").replace("-", "_"): _typed(value) for flag, value in given.items()})


def _typed(value):
    return int(value) if value.isdecimal() else value


def test_grafana_finds_prometheus_and_prometheus_the_server():
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/cloister.yaml").read_text())["providers"]
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["job_name"] == "cloister"
    assert scraped["static_configs"] == [{"targets": ["cloister:8000"]}]
