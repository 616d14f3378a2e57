"""Settings of replicas: what is chosen, what is refused, and what an error says to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.cluster import ReplicaSet
from cloister.engine.machine import read_machine
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.policy import Policy
from cloister.policy.policy import Use
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.refusals import RefusedSettings


def test_replicas_divide_the_threads() -> None:
    resolved = resolve_settings({"replicas": 2}).engine
    assert resolved.config.num_threads == max(1, read_machine().num_cpus // 2)
    assert "divided among 2 replicas" in next(r.why for r in resolved.reasons if r.name == "num_threads")


SEALED_ROLES = {"replicas": 3, "prefill": 1, "decode": 2, "kv_transfer": "sealed", "sealed": True}


@pytest.mark.parametrize(
    ("profile", "router"), [("open", "least_load"), ("team", "least_load"), ("private", "capacity_random")]
)
def test_the_profile_chooses_the_router(profile: str, router: str) -> None:
    assert resolve_settings({"replicas": 2, "profile": profile}).server.config.router == router


@pytest.mark.parametrize(("profile", "forks"), [("open", True), ("team", True), ("private", False), ("paranoid", False)])
def test_engines_are_forked_where_the_profile_allows_it(profile: str, forks: bool) -> None:
    assert resolve_settings({"profile": profile}).server.config.fork_server is forks
    assert resolve_settings({"profile": profile, "fork_server": False}).server.config.fork_server is False


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_executes_each_engine_anew_and_ends_none_while_it_is_idle(profile: str) -> None:
    with pytest.raises(PolicyError, match="addresses of its own"):
        resolve_settings({"profile": profile, "fork_server": True})
    with pytest.raises(PolicyError, match="whether others were there"):
        resolve_settings({"profile": profile, "idle_timeout_s": 60.0})


@pytest.mark.parametrize("profile", ["private", "paranoid"])
@pytest.mark.parametrize("router", ["least_load", "prefix_aware", "round_robin"])
def test_a_strict_profile_allows_only_a_draw(profile: str, router: str) -> None:
    with pytest.raises(PolicyError, match="capacity_random"):
        resolve_settings({"replicas": 2, "profile": profile, "router": router})
    assert resolve_settings({"replicas": 2, "profile": profile, "router": "capacity_random"}).server.config.replicas == 2


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_no_strict_profile_learns_lengths_of_answers(profile: str) -> None:
    for router in ("least_work", "conductor"):
        with pytest.raises(PolicyError, match="lengths are learned from answers"):
            Policy(profile).check({"length-prediction": Use(True, f"setting `router` {router}")})
        with pytest.raises(PolicyError, match="capacity_random"):
            resolve_settings({"replicas": 2, "profile": profile, "router": router})
        assert resolve_settings({"replicas": 2, "profile": "team", "router": router}).server.config.router == router


def test_a_profile_that_refuses_ray_says_so_before_anybody_installs_it() -> None:
    with pytest.raises(PolicyError, match="start more sealed nodes"):
        resolve_settings({"replicas": 2, "profile": "private", "on": "ray"})


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_no_measured_time_decides_where_a_strict_profile_sends_requests(profile: str) -> None:
    assert resolve_settings({"replicas": 2, "profile": profile}).server.config.slow_replicas == "report"
    with pytest.raises(PolicyError, match="set `slow_replicas` to report"):
        resolve_settings({"replicas": 2, "profile": profile, "slow_replicas": "avoid"})
    assert resolve_settings({"replicas": 2}).server.config.slow_replicas == "avoid"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"slow_replicas": "avoid"}, "set replicas to 2 or more"),
        ({"verify_replay": 0.1}, "set replicas to 2 or more"),
        ({"verify_replay": 0.1, "on": "ray"}, "set replicas to 2 or more"),
        ({"verify_replay": 0.1, "replicas": 2, "numerics": "fast", "device": "cuda"}, "numerics exact"),
        ({"router": "least_load"}, "set replicas to 2 or more"),
        ({"replicas": 13, "sealed": True}, "start more nodes"),
        ({"replicas": 2, "router": "least_load", "sealed": True, "profile": "open"}, "set router to capacity_random"),
        ({"replicas": 3, "standby": 1, "sealed": True}, "leave standby out"),
        ({"replicas": 2, "verify_replay": 0.5, "sealed": True}, "leave verify_replay out"),
        ({"replicas": 2, "rebalance": True, "sealed": True, "profile": "open"}, "leave rebalance out"),
        ({"replicas": 2, "slow_replicas": "avoid", "sealed": True, "profile": "open"}, "leave slow_replicas out"),
        ({"replicas": 2, "prefill": 1, "decode": 1, "sealed": True}, "set kv_transfer to sealed"),
        ({"replicas": 2, "kv_transfer": "sealed", "sealed": True}, "set prefill and decode, or leave kv_transfer out"),
        ({"replicas": 2, "kv_transfer": "shm", "prefill": 1, "decode": 1, "sealed": True, "profile": "open"}, "to sealed"),
        ({"replicas": 2, "kv_transfer": "sealed"}, "add sealed, or set it to shm"),
        ({"replicas": 2, "router": "lpm"}, "unknown router 'lpm'; choose one of"),
        ({"replicas": 0}, "replicas"),
        ({"rebalance": True}, "set replicas to 2 or more"),
        ({"prefill": 1, "decode": 1}, "set replicas to 2 or more"),
        ({"replicate_hot_prefixes": True}, "set replicas to 2 or more"),
        ({"standby": 1}, "set replicas to 2 or more"),
        ({"min_replicas": 1}, "set max_replicas"),
        ({"downscale_delay_s": 5.0}, "set max_replicas"),
        ({"max_replicas": 1}, "max_replicas"),
        ({"replicas": 2, "max_replicas": 3}, "leave replicas out"),
        ({"min_replicas": 4, "max_replicas": 3}, "set max_replicas to 4 or more"),
        (
            {"min_replicas": 2, "max_replicas": 2, "standby": 1},
            "2 replicas stay beside 1 that stand by, so set max_replicas to 3",
        ),
        ({"prefill": 1, "decode": 1, "standby": 1, "max_replicas": 2, "kv_transfer": "shm"}, "set max_replicas to 3 or more"),
        ({"max_replicas": 2, "idle_timeout_s": 5.0}, "set min_replicas to 0, or leave idle_timeout_s out"),
        ({"min_replicas": 0, "max_replicas": 2, "on": "ray"}, "set min_replicas to 1 or more, or leave on out"),
        ({"min_replicas": 0, "max_replicas": 2, "standby": 1}, "set min_replicas to 1 or more, or leave standby out"),
        ({"max_replicas": 2, "sealed": True}, "set replicas, and leave max_replicas out"),
        ({"replicas": 2, "standby": 2}, "set replicas to 3 or more"),
        ({"replicas": 3, "standby": 1, "prefill": 1, "decode": 2, "kv_transfer": "shm"}, "1 of 3 .* set replicas to 4 or more"),
        ({"replicas": 2, "standby": 1, "idle_timeout_s": 5.0}, "leave standby or idle_timeout_s out"),
        ({"replicas": 3, "standby": 1, "prefill": 2, "kv_transfer": "unix"}, "no replica is left to decode"),
        ({"replicas": 2, "replicate_hot_prefixes": True}, "set kv_transfer to shm"),
        ({"on": "ray", "replicas": 2, "replicate_hot_prefixes": True}, "set kv_transfer to shm,tls"),
        ({"replicas": 2, "prefill": 2, "kv_transfer": "unix"}, "no replica is left to decode"),
        ({"replicas": 2, "prefill": 1, "decode": 1}, "set kv_transfer to shm"),
        ({"replicas": 2, "max_ttft_s": 1.0}, "set router to conductor"),
        ({"max_ttft_s": 1.0}, "set router to conductor, and replicas to 2 or more"),
        ({"replicas": 2, "kv_transfer": "tls://127.0.0.1:9560"}, "set kv_transfer to tls://HOST:0"),
        ({"kv_transfer": "unix"}, "set replicas to 2 or more"),
        ({"replicas": 2, "kv_transfer": "rdma"}, "unknown transport of KV 'rdma'; choose one of: shm, unix, tls, mooncake$"),
        ({**SEALED_ROLES, "kv_transfer": "rdma"}, "unknown transport of KV 'rdma'; choose one of: sealed$"),
        ({**SEALED_ROLES, "kv_transfer": "shm"}, "set kv_transfer to sealed$"),
        ({"replicas": 2, "kv_transfer": "shm,shm"}, "names a transport twice"),
        ({"replicas": 2, "kv_transfer": "tls:somewhere"}, "write tls://HOST:0"),
        ({"replicas": 2, "kv_transfer": "unix,tls"}, "no address to listen on; set it to shm, or tls://HOST:0"),
        ({"replicas": 2, "kv_transfer": "unix", "prefix_cache": False}, "needs the prefix cache"),
        ({"on": "ray", "sealed": True}, "start more nodes"),
        ({"ray_address": "10.0.0.1:6379"}, "add --on ray"),
        ({"on": "ray", "ray_address": "nonsense"}, "ray_address nonsense is not an address; give HOST:PORT"),
        ({"on": "ray", "ray_address": "host:65536"}, "ray_address host:65536 is not an address"),
        ({"on": "ray", "ray_address": "fd00::1:6379"}, "ray_address fd00::1:6379 is not an address"),
        ({"on": "ray", "ray_address": "ray://10.0.0.1:10001"}, "give HOST:PORT"),
        ({"kv_transfer": "unix", "replicas": 2, "on": "ray"}, "engines are on several machines.*set kv_transfer to shm,tls"),
        ({"kv_transfer": "tls://10.0.0.1:0", "replicas": 2, "on": "ray"}, "set kv_transfer to shm,tls"),
        ({"on": "ray", "replicas": 2, "prefill": 1, "decode": 1}, "computed twice; set kv_transfer to shm,tls"),
        ({"on": "ray", "replicas": 2, "prefill": 2, "kv_transfer": "unix,tls"}, "no replica is left to decode"),
        ({"on": "slurm"}, "on must be one of"),
        ({"on": "ray", "idle_timeout_s": 5.0}, "leave idle_timeout_s out, or on ray"),
        ({"on": "ray", "fork_server": True}, "leave fork_server out, or on ray"),
        ({"idle_keeps": "weights"}, "set idle_timeout_s"),
        ({"idle_timeout_s": 5.0, "idle_keeps": "weights", "fork_server": False}, "switch fork_server on"),
        ({"idle_timeout_s": 5.0, "sealed": True, "profile": "open"}, "the starter of a sealed node makes its engines"),
        ({"fork_server": True, "sealed": True, "profile": "open"}, "the starter of a sealed node makes its engines"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_what_to_do(flags: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_settings(flags)


def test_there_are_places_for_as_many_replicas_as_there_may_be() -> None:
    settings = resolve_settings({"max_replicas": 3, "min_replicas": 2})
    assert settings.server.config.replicas == 3
    assert settings.server.config.idle_timeout_s is None
    cluster = make_engine(settings.engine.config, settings.server.config)
    assert isinstance(cluster, ReplicaSet)
    assert [snapshot.is_stopped for snapshot in cluster.snapshots()] == [False, False, True]


def test_with_none_that_must_stay_the_last_engine_ends_as_idle() -> None:
    flags = {"max_replicas": 3, "min_replicas": 0, "downscale_delay_s": 7.0}
    assert resolve_settings(flags).server.config.idle_timeout_s == 7.0
    assert resolve_settings({**flags, "idle_timeout_s": 90.0}).server.config.idle_timeout_s == 90.0


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_no_load_decides_how_many_replicas_a_strict_profile_has(profile: str) -> None:
    with pytest.raises(PolicyError, match="set `replicas` to a fixed number"):
        resolve_settings({"max_replicas": 2, "profile": profile})
    for other in ("open", "team"):
        assert resolve_settings({"max_replicas": 2, "profile": other}).server.config.replicas == 2


@pytest.mark.parametrize("where", ["shm", "unix", "tls://192.0.2.1:0", "shm,tls://192.0.2.1:0"])
def test_kv_moves_between_replicas_in_all_but_strict_profiles(where: str) -> None:
    for profile in ("open", "team"):
        settings = resolve_settings({"replicas": 2, "kv_transfer": where, "profile": profile})
        assert settings.engine.config.kv_transfer == where
    for profile in ("private", "paranoid"):
        with pytest.raises(PolicyError, match="attested peers" if profile == "private" else "never leaves the engine"):
            resolve_settings({"replicas": 2, "kv_transfer": where, "profile": profile})


@pytest.mark.parametrize("where", ["mooncake", "shm,mooncake"])
def test_only_one_user_may_have_kv_pass_through_ports_that_ask_nobody_who_they_are(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"replicas": 2, "kv_transfer": where}
    for profile in ("team", "private", "paranoid"):
        why = {"team": "no port may listen", "private": "attested peers", "paranoid": "never leaves the engine"}[profile]
        with pytest.raises(PolicyError, match=why):
            resolve_settings({**flags, "profile": profile})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'cloister\[mooncake\]'; or set it to shm"):
        resolve_settings({**flags, "profile": "open"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert resolve_settings({**flags, "profile": "open"}).engine.config.kv_transfer == where


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_moves_nothing_by_load_and_has_no_roles(profile: str) -> None:
    copies = {"replicate_hot_prefixes": True, "kv_transfer": "unix"}
    for flags in ({"rebalance": True}, {"prefill": 1, "decode": 1, "kv_transfer": "unix"}, copies):
        with pytest.raises((PolicyError, RefusedSettings)) as refused:
            resolve_settings({"replicas": 2, "profile": profile, **flags})
        for refusal in refused.value.refusals if isinstance(refused.value, RefusedSettings) else ():
            assert isinstance(refusal, PolicyError)


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_refuses_roles_before_it_is_said_what_they_need(profile: str) -> None:
    with pytest.raises(PolicyError, match="leave `prefill` and `decode` out"):
        resolve_settings({"replicas": 2, "profile": profile, "prefill": 1, "decode": 1})


def test_a_sealed_node_may_have_roles_whose_kv_is_encrypted() -> None:
    settings = resolve_settings({**SEALED_ROLES, "profile": "private"})
    assert settings.server.config.router == "capacity_random"
    assert settings.server.config.slow_replicas == "report"
    with pytest.raises(RefusedSettings, match=r"sealed-kv-transfer.*\n.*sealed-disagg.*KV never leaves the engine"):
        resolve_settings({**SEALED_ROLES, "profile": "paranoid"})
    with pytest.raises(RefusedSettings, match="attested peers"):  # the same engines without a seal
        resolve_settings({"replicas": 3, "prefill": 1, "decode": 2, "kv_transfer": "shm", "profile": "private"})


@pytest.mark.parametrize("profile", ["open", "team", "private", "paranoid"])
def test_in_a_sealed_node_engines_are_drawn_whatever_the_profile(profile: str) -> None:
    config = resolve_settings({"replicas": 2, "sealed": True, "profile": profile}).server.config
    assert (config.router, config.slow_replicas, config.fork_server) == ("capacity_random", "report", False)


@pytest.mark.parametrize("profile", ["team", "private", "paranoid"])
def test_prefixes_are_copied_where_there_is_one_user_only(profile: str) -> None:
    policy = resolve_settings({"replicas": 2, "profile": profile}).policy
    assert not policy.allows("hot-prefixes")
    assert resolve_settings({"replicas": 2, "kv_transfer": "unix", "profile": "open"}).policy.allows("hot-prefixes")


@pytest.mark.parametrize("setting", ["replicas = 2", 'on = "ray"'])
def test_several_models_have_no_replicas(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "cloister.toml"
    file.write_text(setting + '\n[models.a]\nmodel = "cloister-5m"\n[models.b]\nmodel = "cloister-draft"\n')
    with pytest.raises(ConfigError, match="all replicas serve one model"):
        resolve_settings(config_file=file)


def test_an_engine_without_a_server_has_no_replicas() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        resolve_settings({"replicas": 2}, listens=False)


@pytest.fixture
def ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'cloister\[ray\]'"):
        resolve_settings({"on": "ray"})


@pytest.mark.usefixtures("ray_is_installed")
@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_refuses_replicas_that_an_orchestrator_places(profile: str) -> None:
    with pytest.raises(PolicyError, match="nobody has attested the machines"):
        resolve_settings({"on": "ray", "profile": profile})


@pytest.mark.usefixtures("ray_is_installed")
def test_threads_are_those_of_ray_machines_one_replica_has_a_router_too_and_none_is_a_fork() -> None:
    joined = resolve_settings({"on": "ray", "ray_address": "10.0.0.1:6379"})
    assert joined.engine.config.num_threads is None
    assert joined.server.config.router == "least_load"
    assert joined.server.config.fork_server is False
    alone = resolve_settings({"on": "ray", "replicas": 2})
    assert alone.engine.config.num_threads == max(1, read_machine().num_cpus // 2)
    assert resolve_settings({"on": "ray", "ray_address": "x:1", "num_threads": 3}).engine.config.num_threads == 3


@pytest.mark.usefixtures("ray_is_installed")
def test_replicas_that_ray_places_have_roles_and_each_listens_on_the_address_of_its_machine() -> None:
    flags = {"on": "ray", "ray_address": "x:1", "replicas": 2, "prefill": 1, "decode": 1, "kv_transfer": "shm,tls"}
    for profile in ("open", "team"):
        resolved = resolve_settings({**flags, "profile": profile})
        assert resolved.engine.config.kv_transfer == "shm,tls"
        assert (resolved.server.config.prefill, resolved.server.config.decode) == (1, 1)
