"""Kubernetes runs the server as compose and systemd do: as nobody, on a disk that is read-only, reached by few."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cloister import __version__
from cloister.server.middleware.auth import OPEN_PATHS
from cloister.types.config import EngineConfig, ServerConfig, setting_names

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/cloister"
PLAIN = ROOT / "deploy/kubernetes/cloister.yaml"
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all(PLAIN.read_text())}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
EVERYTHING = {"apiKeys": "keys", "models": "m", "cache": "c", "download": True, "arguments": ["--max-num-seqs", "32"]}


def render(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the manifests that Helm makes of the chart, by kind."""
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (extra chart)")
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(dict(values), name="cloister").values()
    return {each["kind"]: each for text in texts for each in yaml.safe_load_all(text) if each is not None}


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.35"])
def test_kubernetes_knows_every_field(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (extra check)")
    for manifest in MANIFESTS.values():
        validate.validate(manifest, version, strict=True)


def test_the_plain_manifests_are_what_the_chart_makes() -> None:
    assert render({}) == MANIFESTS


def test_a_chart_with_every_value_set_makes_manifests_that_kubernetes_knows() -> None:
    made = render(EVERYTHING)
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (extra check)")
    for manifest in made.values():
        validate.validate(manifest, "1.31", strict=True)
    pod = made["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][-3:] == ["--api-keys=/keys/keys.json", "--max-num-seqs", "32"]
    assert made["NetworkPolicy"]["spec"]["egress"]


def test_helm_gives_each_pod_its_engines() -> None:
    [container] = render({"engines": 2})["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert "--replicas=2" in container["args"]


def test_helm_lets_engines_come_and_go() -> None:
    [container] = render({"maxEngines": 4, "minEngines": 0})["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert [word for word in container["args"] if "replicas" in word] == ["--min-replicas=0", "--max-replicas=4"]


@pytest.mark.parametrize(
    "values", [{"maxEngines": 4, "engines": 2}, {"minEngines": 2}, {"minEngines": 3, "maxEngines": 2}, {"maxEngines": -1}]
)
def test_helm_refuses_engines_that_contradict_each_other(values: dict[str, int]) -> None:
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (extra chart)")
    with pytest.raises(helm.HelmError):
        render(values)


def test_helm_has_nothing_against_the_chart_and_refuses_values_that_it_does_not_know() -> None:
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (extra chart)")
    found = helm.lint(str(CHART))
    assert not found["errors"]
    assert {message["error"] for message in found["messages"]} <= {"icon is recommended"}
    with pytest.raises(helm.HelmValuesError, match="modell"):
        render({"modell": "x"})


def test_values_fit_their_schema_and_a_misspelt_one_does_not() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert set(values) == set(schema["properties"]) - {"global"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "modell": "x"}, schema)


def test_the_chart_names_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert SERVER["image"] == f"cloister:{__version__}"


def test_the_server_is_no_root_writes_to_two_places_and_takes_no_rights() -> None:
    (uid,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert POD["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(uid),
        "runAsGroup": int(uid),
        "fsGroup": int(uid),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert SERVER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False
    assert {mount["mountPath"] for mount in SERVER["volumeMounts"]} == {"/home/cloister/.cache", "/tmp"}
    assert {"cpu", "memory"} <= set(SERVER["resources"]["limits"])


def test_only_its_clients_reach_the_server_and_it_reaches_nobody() -> None:
    policy = MANIFESTS["NetworkPolicy"]["spec"]
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == MANIFESTS["Service"]["spec"]["selector"] == labels
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    assert policy["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": "http"}]}]


def test_probes_ask_what_needs_no_key_and_arguments_are_settings() -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert SERVER[probe]["httpGet"]["path"] in OPEN_PATHS
    flags = [word.removeprefix("--").partition("=")[0].replace("-", "_") for word in SERVER["args"][1:]]
    assert set(flags) <= set(setting_names(EngineConfig, ServerConfig))
    graceful_s = ServerConfig().drain_timeout_s + float(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert graceful_s < POD["terminationGracePeriodSeconds"]
