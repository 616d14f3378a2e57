"""A cluster starts as one server does: as nobody, on read-only disks, with settings that exist, and closed to the rest."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cloister import __version__
from cloister.types.config import EngineConfig, ServerConfig, setting_names

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.cluster.yaml").read_text())
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/raycluster.yaml").read_text())}
RAY = MANIFESTS["RayCluster"]
HEAD, (WORKERS,) = RAY["spec"]["headGroupSpec"], RAY["spec"]["workerGroupSpecs"]
PODS = {"head": HEAD["template"], "worker": WORKERS["template"]}

GROUP = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "properties": {
        "groupName": {"type": "string"},
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": {"type": "object"},
        **{name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")},
    },
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "spec": {
            "type": "object",
            "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": {"type": "string"},
                "headGroupSpec": GROUP,
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {**GROUP, "required": [*GROUP["required"], "groupName", "minReplicas", "maxReplicas"]},
                },
            },
            "additionalProperties": False,
        },
    },
}
"""The fields of KubeRay's RayCluster (ray.io/v1) that the manifest may use; pod templates are those of Kubernetes."""


def pinned_ray() -> str:
    (requirement,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    return requirement.removeprefix("ray==")


def flags_of(command: str) -> dict[str, str]:
    served = command.partition("cloister serve ")[2]
    return dict(re.findall(r"--([a-z-]+)[ =](\S+)", served))


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.35"])
def test_kubernetes_knows_every_field(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (extra check)")
    for kind in ("Service", "NetworkPolicy"):
        validate.validate(MANIFESTS[kind], version, strict=True)
    for name, template in PODS.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}, "spec": template["spec"]}
        validate.validate(pod, version, strict=True)


def test_the_ray_cluster_has_the_fields_of_its_kind_and_a_misspelt_one_is_found() -> None:
    jsonschema.validate(RAY, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**RAY, "spec": {**RAY["spec"], "workerGroupSpec": []}}, SCHEMA)


def test_versions_are_those_of_the_package() -> None:
    assert RAY["spec"]["rayVersion"] == pinned_ray()
    assert {pod["spec"]["containers"][0]["image"] for pod in PODS.values()} == {f"cloister:{__version__}"}
    assert pinned_ray() in (ROOT / "docs/cluster.md").read_text()


@pytest.mark.parametrize("name", list(PODS))
def test_pods_are_no_root_write_to_few_places_and_show_ray_a_token(name: str) -> None:
    pod = PODS[name]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/home/cloister/.cache", "/tmp", "/dev/shm"}
    assert {"readinessProbe", "livenessProbe"} <= set(container)  # else the operator puts in its own, which need wget
    values: dict[str, Any] = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert values["RAY_AUTH_MODE"] == "token"
    assert values["RAY_USAGE_STATS_ENABLED"] == "0"
    assert "secretKeyRef" in values["RAY_AUTH_TOKEN"]


def test_the_front_has_settings_that_exist_and_nodes_have_a_place_for_each_replica() -> None:
    (front,) = HEAD["template"]["spec"]["containers"]
    flags = flags_of(front["args"][0])
    assert {name.replace("-", "_") for name in flags} <= set(setting_names(EngineConfig, ServerConfig))
    cpus = int(WORKERS["rayStartParams"]["num-cpus"])
    assert f"--num-cpus={cpus} " in WORKERS["template"]["spec"]["containers"][0]["args"][0]
    assert WORKERS["replicas"] * (cpus // int(flags["num-threads"])) >= int(flags["replicas"])
    assert MANIFESTS["Service"]["spec"]["selector"].items() <= HEAD["template"]["metadata"]["labels"].items()


def test_only_the_port_of_the_server_is_open_to_others() -> None:
    among, others = MANIFESTS["NetworkPolicy"]["spec"]["ingress"]
    own = {"matchLabels": {"app.kubernetes.io/name": "cloister-ray"}}
    assert among == {"from": [{"podSelector": own}]}
    assert others["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert MANIFESTS["NetworkPolicy"]["spec"]["podSelector"] == own


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cluster.yaml"])
def test_compose_files_fit_the_schema_of_the_compose_specification(name: str) -> None:
    owner = importlib.util.find_spec("check_jsonschema")
    if owner is None or owner.origin is None:
        pytest.skip("needs check-jsonschema (extra check), which has the schema")
    schema = json.loads((Path(owner.origin).parent / "builtin_schemas/vendor/compose-spec.json").read_text())
    compose = yaml.safe_load((ROOT / "deploy" / name).read_text())
    jsonschema.validate(compose, schema)
    for service in compose["services"].values():
        service["read-only"] = True
        with pytest.raises(jsonschema.ValidationError, match="read-only"):
            jsonschema.validate(compose, schema)
        del service["read-only"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"REPLICAS": "3"}, {"--replicas": "3"}),
        ({"REPLICAS": "3", "MIN_REPLICAS": "1", "MAX_REPLICAS": "3"}, {"--min-replicas": "1", "--max-replicas": "3"}),
    ],
)
def test_compose_gives_the_front_its_replicas(variables: dict[str, str], wanted: dict[str, str]) -> None:
    command = COMPOSE["services"]["front"]["command"][0].replace("$$", "$")
    script = command.replace("/opt/cloister/bin/ray", "true").replace("exec /opt/cloister/bin/cloister", r"printf '%s\n'")
    environment = {"MODEL": "cloister-5m", "MAX_REPLICAS": "", **variables}
    printed = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    verb, *arguments = printed.splitlines()
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert verb == "serve"
    assert {flag: value for flag, value in given.items() if "replicas" in flag} == wanted
    assert {name[2:].replace("-", "_") for name in given} <= set(setting_names(EngineConfig, ServerConfig))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cluster.yaml"])
def test_every_command_that_starts_a_compose_file_sets_what_the_file_asks_for(name: str) -> None:
    """Compose refuses the file otherwise: `${NAME:?why}`."""
    asked = re.findall(r"\$\{(\w+):\?", (ROOT / "deploy" / name).read_text())
    assert asked
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.yaml")]
    commands = [
        line for page in pages for line in page.read_text().splitlines() if re.search(rf"compose -f deploy/{name} up", line)
    ]
    assert commands
    for command in commands:
        assert [variable for variable in asked if f"{variable}=" not in command] == []


def test_compose_opens_loopback_only_and_has_a_node_for_each_replica() -> None:
    front, node = COMPOSE["services"]["front"], COMPOSE["services"]["node"]
    assert front["ports"] == ["127.0.0.1:8000:8000"]
    assert "ports" not in node
    assert COMPOSE["networks"]["cluster"] == {"internal": True}
    assert node["networks"] == ["cluster"]
    for service in (front, node):
        assert service["read_only"]
        assert service["build"]["args"] == {"EXTRAS": "ray"}
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
    assert front["environment"]["REPLICAS"] == f"${{REPLICAS:-{node['deploy']['replicas']}}}"
    assert "ARG EXTRAS=" in (ROOT / "Dockerfile").read_text()
