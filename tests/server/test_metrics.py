"""Figures come from the engine's events alone, and no label from a request."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloister.engine.replica_snapshot import LengthErrors, ReplicaSnapshot
from cloister.policy import CountRelease
from cloister.server.metrics import EngineGauges, Metrics, ReleasedCounts
from cloister.types.events import Arrived, Drafting, Ended, KVLoaded, KVStored, Preempted, Progressed, Scheduled, Stepped
from cloister.types.request import FinishReason
from tests.server.running_server import MODEL, ScriptedEngine, make_gate, says, serving, start_speaking

LABELS = {
    "drafter",
    "tier",
    "result",
    "finished_reason",
    "route",
    "status",
    "le",
    "state",
    "part",
    "phase",
    "position",
    "process",
    "replica",
    "model_name",
    "fingerprint",
    "max_model_len",
    "version",
}


def figures(text: str) -> dict[str, float]:
    """Every sample as name{labels} -> value."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert set(sample.labels) <= LABELS
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "le")
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def ended(request_id: str, now_s: float, **more: object) -> Ended:
    fields = {"seq_id": 1, "index": 0, "reason": FinishReason.STOP, "num_prompt_tokens": 30, "num_output_tokens": 3}
    times = {"num_cached_tokens": 16, "arrival_s": 10.0, "first_token_s": 10.5, "last": True}
    return Ended(request_id=request_id, now_s=now_s, **{**fields, **times, **more})


def life_of_a_request() -> list[object]:
    return [
        Arrived("r", 10.0, 30),
        Scheduled("r", 10.2, 0.2, 16, 30, num_queried_tokens=29),
        Progressed("r", 1, 0, 10.5, 1, True),
        Progressed("r", 1, 0, 10.9, 2, False),
        Stepped(10.9, 0.1, 2, 1, 1, 0, 4, 2, 8),
        Preempted("r", 11.0),
        Scheduled("r", 11.5, 0.5, 0, 30, resumed=True),
        ended("r", 12.0),
    ]


def test_what_was_drafted_and_accepted_is_counted_by_drafter_and_place():
    metrics = Metrics()
    first = (Drafting("medusa", 2, (2, 1), (2, 0), 0.01), Drafting("ngram", 0, (), (), 0.001))
    metrics.observe(Stepped(1.0, 0.3, 4, 2, 2, 0, 4, 2, 8, drafting=first, gained_s=0.2, spent_s=0.1))
    metrics.observe(
        Stepped(1.1, 0.1, 4, 2, 2, 0, 4, 2, 8, drafting=(Drafting("medusa", 1, (1, 1, 1), (1, 1), 0.02),), spent_s=-0.05)
    )
    text = metrics.render().decode()
    shown = figures(text)
    name = "cloister_spec_decode_{}_total{}".format
    assert shown[name("num_drafts", "{drafter=medusa}")] == 3
    assert shown[name("num_draft_tokens", "{drafter=medusa}")] == 6
    assert shown[name("num_accepted_tokens", "{drafter=medusa}")] == 4
    assert [shown[name("num_accepted_tokens_per_pos", f"{{drafter=medusa,position={p}}}")] for p in range(3)] == [3, 1, 0]
    assert [shown[name("num_draft_tokens_per_pos", f"{{drafter=medusa,position={p}}}")] for p in range(3)] == [3, 2, 1]
    assert shown[name("draft_seconds", "{drafter=medusa}")] == pytest.approx(0.03)
    assert shown[name("draft_seconds", "{drafter=ngram}")] == pytest.approx(0.001)
    assert shown[name("gained_seconds", "")] == pytest.approx(0.2)
    assert shown[name("spent_seconds", "")] == pytest.approx(0.1), "a counter does not fall"


def test_a_strict_profile_lets_nothing_out_of_what_was_accepted():
    counts = ReleasedCounts(CountRelease(threshold=2))
    for number in range(3):
        counts.observe(Stepped(1.0, 0.3, 4, 2, 2, 0, 4, 2, 8, drafting=(Drafting("medusa", 2, (2, 1), (2, 0), 0.01),)))
        counts.observe(ended(f"r{number}", 12.0))
    text = counts.render().decode()
    assert "cloister_requests_total" in text
    assert "spec" not in text
    assert "medusa" not in text


def test_a_strict_profile_says_why_its_page_has_no_figures_yet():
    counts = ReleasedCounts(CountRelease(threshold=2))
    counts.observe(ended("r0", 12.0))
    before = counts.render().decode()
    assert before.startswith("# The privacy profile")
    assert "after 2 requests have ended" in before
    assert not figures(before)
    counts.observe(ended("r1", 12.0))
    assert figures(counts.render().decode())["cloister_requests_total"] == 2


def test_events_become_figures():
    metrics = Metrics()
    events = life_of_a_request()
    for event in events[:5]:
        metrics.observe(event)
    running = figures(metrics.render().decode())
    assert (running["cloister_num_requests_running"], running["cloister_num_requests_waiting"]) == (1, 0)
    assert running["cloister_kv_cache_usage_perc"] == 0.5
    metrics.observe(events[5])
    preempted = figures(metrics.render().decode())
    assert (preempted["cloister_num_requests_running"], preempted["cloister_num_requests_waiting"]) == (0, 1)
    for event in events[6:]:
        metrics.observe(event)
    after = figures(metrics.render().decode())
    assert (after["cloister_num_requests_running"], after["cloister_num_requests_waiting"]) == (0, 0)
    assert after["cloister_kv_cache_usage_perc"] == 0
    assert after["cloister_prompt_tokens_total"] == 30
    assert after["cloister_generation_tokens_total"] == 3
    assert after["cloister_prefix_cache_hits_total"] == 16
    assert after["cloister_prefix_cache_queries_total"] == 29
    assert after["cloister_num_preemptions_total"] == 1
    assert after["cloister_request_success_total{finished_reason=stop}"] == 1
    assert after["cloister_time_to_first_token_seconds_sum"] == pytest.approx(0.5)
    assert after["cloister_e2e_request_latency_seconds_sum"] == pytest.approx(2.0)
    assert after["cloister_request_queue_time_seconds_sum"] == pytest.approx(0.2)
    assert after["cloister_inter_token_latency_seconds_count"] == 2
    assert after["cloister_inter_token_latency_seconds_sum"] == pytest.approx(0.4)


def test_time_between_tokens_is_counted_in_buckets_up_to_their_bound():
    metrics = Metrics()
    for now_s, num_tokens in ((0.0, 1), (0.001, 1), (0.02, 2), (5.0, 1), (99.0, 1)):
        metrics.observe(Progressed("r", 1, 0, now_s, num_tokens, False))
    families = text_string_to_metric_families(metrics.render().decode())
    (gaps,) = (family for family in families if family.name == "cloister_inter_token_latency_seconds")
    buckets = {sample.labels["le"]: sample.value for sample in gaps.samples if "le" in sample.labels}
    assert [buckets[le] for le in ("0.001", "0.0025", "0.01", "2.5", "10.0", "+Inf")] == [1, 1, 3, 3, 4, 5]


def test_requests_that_ended_leave_nothing_behind():
    metrics = Metrics()
    for event in life_of_a_request():
        metrics.observe(event)
    assert not any(vars(metrics._lives).values())


def test_blocks_are_not_told_before_the_engine_said_how_many_there_are():
    shown = figures(Metrics().render().decode())
    assert not [name for name in shown if name.startswith("cloister_kv_blocks")]
    assert shown["cloister_kv_cache_usage_perc"] == 0


def test_loads_and_stores_of_kv_are_counted_by_tier():
    metrics = Metrics()
    for tier, complete in (("disk", True), ("disk", True), ("disk", False), ("", True), ("", True), ("peer", True)):
        metrics.observe(KVLoaded("r", 1.0, 32, 1000, 0.25, complete=complete, tier=tier))
    for num_bytes, used, oldest_s in ((500, 700, 2.0), (300, 900, 5.0)):
        stored = KVStored("disk", num_bytes=num_bytes, used_bytes=used, oldest_s=oldest_s)
        metrics.observe(Stepped(10.9, 0.1, 2, 1, 1, 0, 4, 2, 8, stored=(stored,)))
    shown = figures(metrics.render().decode())
    assert shown["cloister_kv_loads_total{result=whole,tier=disk}"] == 2
    assert shown["cloister_kv_loads_total{result=part,tier=disk}"] == 1
    assert shown["cloister_kv_loads_total{result=whole,tier=engine}"] == 2, "loads from another engine"
    assert shown["cloister_kv_loads_total{result=whole,tier=peer}"] == 1, "the tier `peer`"
    assert shown["cloister_kv_loaded_bytes_total{tier=disk}"] == 3000
    assert shown["cloister_kv_load_seconds_total{tier=disk}"] == 0.75
    assert shown["cloister_kv_stored_bytes_total{tier=disk}"] == 800
    assert shown["cloister_kv_tier_used_bytes{tier=disk}"] == 900
    assert shown["cloister_kv_tier_oldest_seconds{tier=disk}"] == 5.0
    for_users = metrics.render(for_operator=False).decode()
    assert "kv_tier_" not in for_users, "what a tier holds is everybody's"
    assert "cloister_kv_loads_total" in for_users


def test_a_step_says_how_long_it_took_and_what_the_blocks_hold():
    metrics = Metrics()
    metrics.observe(Arrived("r", 10.0, 30))
    metrics.observe(Stepped(10.9, 0.1, 7, 1, 1, 0, 4, 2, 8))
    shown = figures(metrics.render().decode())
    assert [shown[f"cloister_kv_blocks{{state={state}}}"] for state in ("used", "cached", "free")] == [4, 2, 2]
    assert shown["cloister_step_time_seconds_sum"] == pytest.approx(0.1)
    assert shown["cloister_step_tokens_sum"] == 7


@pytest.mark.parametrize(("num_cached", "expected"), [(2, [0, 6, 2]), (0, [0, 0, 8])])
def test_no_block_is_used_while_no_request_is_open(num_cached, expected):
    metrics = Metrics()
    metrics.observe(Arrived("r", 10.0, 30))
    metrics.observe(Stepped(10.9, 0.1, 7, 1, 1, 0, 4, num_cached, 8))
    metrics.observe(ended("r", 12.0))
    shown = figures(metrics.render().decode())
    assert [shown[f"cloister_kv_blocks{{state={state}}}"] for state in ("used", "cached", "free")] == expected
    assert shown["cloister_kv_cache_usage_perc"] == 0


def test_prefill_and_decode_are_told_apart_also_after_a_preemption():
    metrics = Metrics()
    for event in life_of_a_request():
        metrics.observe(event)
    shown = figures(metrics.render().decode())
    assert shown["cloister_request_prefill_time_seconds_sum"] == pytest.approx(0.3)
    assert shown["cloister_request_decode_time_seconds_sum"] == pytest.approx(1.5)
    assert shown["cloister_request_prompt_tokens_sum"] == 30
    assert shown["cloister_request_generation_tokens_sum"] == 3


def test_what_was_known_at_the_start_is_shown_as_it_is_now():
    engine = ScriptedEngine(says("x"))
    engine.memory, engine.startup = [("weights", 5), ("KV cache", 7)], [("read", 0.5), ("build", 1.5)]
    metrics = Metrics(EngineGauges(engine, "org/served"))
    shown = figures(metrics.render().decode())
    assert shown["cloister_memory_budget_bytes{part=KV cache}"] == 7
    assert shown["cloister_startup_seconds{phase=build}"] == 1.5
    assert 2**20 < shown["cloister_process_memory_bytes{process=front}"] < 2**40
    assert "cloister_process_memory_bytes{process=engine}" not in shown
    assert shown["cloister_engine_healthy"] == 1
    assert any(name.startswith("cloister_model_info{") and "model_name=org/served" in name for name in shown)
    engine.good = False
    assert figures(metrics.render().decode())["cloister_engine_healthy"] == 0


@pytest.mark.parametrize("num_restarts", [[2], [0, 3]], ids=["one engine", "two replicas"])
def test_restarts_are_counted_for_each_engine_also_where_there_is_one(num_restarts):
    engine = ScriptedEngine(says("x"))
    engine.snapshots = lambda: [ReplicaSnapshot(index, num_restarts=count) for index, count in enumerate(num_restarts)]
    lines = Metrics(EngineGauges(engine, "m")).render().decode().splitlines()
    shown = [line for line in lines if line.startswith("cloister_replica_restarts_total{")]
    assert shown == [
        f'cloister_replica_restarts_total{{replica="{index}"}} {float(count)}' for index, count in enumerate(num_restarts)
    ]


def test_how_wrong_predicted_lengths_are_is_shown_where_anything_predicts_them():
    engine = ScriptedEngine(says("x"))
    metrics = Metrics(EngineGauges(engine, "m"))
    assert "cloister_predicted" not in metrics.render().decode()
    engine.length_errors = lambda: LengthErrors(num_answers=4, num_tokens=100, num_error_tokens=30.5, num_above_p90=1)
    shown = figures(metrics.render().decode())
    names = ("answers", "tokens", "tokens_error", "above_p90")
    assert [shown[f"cloister_predicted_{name}_total"] for name in names] == [4, 100, 30.5, 1]


def test_no_series_says_when_a_counter_was_made():
    metrics = Metrics()
    metrics.count_reply("/v1/models", 200)
    for event in life_of_a_request():
        metrics.observe(event)
    assert "_created" not in metrics.render().decode()


def test_the_metrics_of_a_real_server_add_up(model_path):
    with serving(model_path, lambda: start_speaking(model_path)) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            client.post("/v1/completions", json={"model": MODEL, "prompt": "four", "max_tokens": 5})
        client.post("/v1/completions", json={"model": MODEL, "prompt": ""})
        client.get("/v1/made-up-by-a-client")
        reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = figures(reply.text)
    assert samples["cloister_prompt_tokens_total"] == 12
    assert samples["cloister_generation_tokens_total"] == 15
    assert samples["cloister_request_success_total{finished_reason=length}"] == 3
    assert samples["cloister_num_requests_running"] == 0
    assert samples["cloister_http_replies_total{route=/v1/completions,status=200}"] == 3
    assert samples["cloister_http_replies_total{route=/v1/completions,status=400}"] == 1
    assert samples["cloister_http_replies_total{route=none,status=404}"] == 1
    assert "made-up" not in reply.text


def test_a_strict_profile_lets_out_sums_of_many_requests_only(model_path):
    gate = make_gate("private")
    with (
        serving(model_path, lambda: start_speaking(model_path), gate=gate) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        before = client.get("/metrics").text
        assert figures(before) == {}
        for _ in range(19):
            client.post("/v1/completions", json={"model": MODEL, "prompt": "four", "max_tokens": 2})
        assert client.get("/metrics").text == before
        client.post("/v1/completions", json={"model": MODEL, "prompt": "four", "max_tokens": 2})
        shown = figures(client.get("/metrics").text)
    assert shown["cloister_requests_total"] == 20
    assert shown["cloister_prompt_tokens_total"] == 80
    assert shown["cloister_generation_tokens_total"] == 40
    assert not [name for name in shown if re.search("seconds|cache|waiting|reason", name)]


def test_sequences_of_one_request_count_once_in_what_is_released():
    counts = ReleasedCounts(CountRelease(threshold=2))
    for request_id in ("a", "b"):
        counts.observe(ended(request_id, 12.0, last=False))
        counts.observe(ended(request_id, 12.0, index=1))
    shown = figures(counts.render().decode())
    assert (shown["cloister_requests_total"], shown["cloister_prompt_tokens_total"]) == (2, 60)
    assert shown["cloister_generation_tokens_total"] == 12
