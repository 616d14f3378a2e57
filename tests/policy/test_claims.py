"""Every mitigation that the policy claims has a test that shows it. What is claimed and not tested is written down, and that
list may only get shorter."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from cloister.policy.features import FEATURES
from cloister.policy.matrix import ROWS
from cloister.policy.verdict import Profile, Verdict

TESTS = Path(__file__).parents[1]

SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "paging": (
        "policy/attacks/test_prefix_cache.py::test_a_block_is_clean_before_another_can_get_it_and_one_that_is_not_is_noticed",
        "backends/test_blocks.py::test_a_wiped_block_is_zero_in_every_layer",
    ),
    "prefix-cache": (
        "policy/attacks/test_prefix_cache.py::test_a_tenant_does_not_feel_the_hits_of_another",
        "policy/attacks/test_prefix_cache.py::test_in_private_not_even_one_key_feels_its_own",
        "policy/test_gate.py::test_loopback_without_keys_is_one_scope_and_hits",
        "policy/test_credentials.py::test_keys_of_one_tenant_share_a_salt_that_its_name_does_not_tell",
    ),
    "offload": (
        "engine/test_kv_tiers.py::test_a_file_has_no_name_and_nothing_of_a_request_in_it",
        "engine/test_kv_tiers.py::test_a_scope_that_ended_takes_its_key_along",
        "e2e/test_kv_tiers.py::test_strict_profiles_refuse_a_tier",
    ),
    "pulling": (
        "engine/test_kv_transfer.py::test_who_does_not_know_the_secret_gets_nothing_and_no_line_in_the_log",
        "cluster/test_routers.py::test_two_scopes_never_share_a_place",
        "cluster/test_settings.py::test_kv_moves_between_replicas_in_all_but_strict_profiles",
    ),
    "migration": (
        "cluster/test_migration.py::test_the_target_is_drawn_by_capacity_among_all_that_qualify",
        "cluster/test_settings.py::test_a_strict_profile_moves_nothing_by_load_and_has_no_roles",
        "cluster/test_settings.py::test_a_strict_profile_allows_only_a_draw",
        "cluster/test_balancing.py::test_where_only_a_draw_is_allowed_a_drained_replica_gives_its_requests_away_by_capacity",
        "cluster/test_action_log.py::test_drains_flips_and_updates_are_logged_and_counted",
        "cluster/test_action_log.py::test_moves_are_logged_as_sums_at_most_once_a_minute",
    ),
    "migration.load": (
        "cluster/test_migration.py::test_the_target_is_drawn_by_capacity_among_all_that_qualify",
        "cluster/test_balancing.py::test_a_request_that_fits_nowhere_starts_once_another_one_has_left_its_replica",
    ),
    "disaggregation": (
        "engine/test_kv_transfer.py::test_a_source_with_another_secret_neither_gives_nor_is_believed",
        "cluster/test_settings.py::test_a_sealed_node_may_have_roles_whose_kv_is_encrypted",
        "engine/test_kv_sealed_link.py::test_an_operator_who_taps_a_link_reads_no_kv_no_scope_and_no_prefix_key",
        "engine/test_kv_sealed_link.py::test_an_engine_that_was_not_given_the_secret_gets_nothing_and_is_not_believed",
        "engine/test_kv_sealed_link.py::test_an_engine_gives_kv_of_requests_that_went_on_elsewhere_and_of_no_other",
        "engine/test_kv_sealed_link.py::test_keys_are_of_one_connection_and_gone_with_it",
        "e2e/test_sealed_unit.py::test_engines_of_a_unit_answer_as_one_and_each_of_them_is_drawn",
    ),
    "disaggregation.plain": (
        "engine/test_kv_transfer.py::test_a_source_with_another_secret_neither_gives_nor_is_believed",
        "engine/test_kv_transfer.py::test_nobody_between_two_machines_reads_a_key_or_kv",
        "cluster/test_settings.py::test_a_strict_profile_refuses_roles_before_it_is_said_what_they_need",
    ),
    "disaggregation.plain-transfer": (
        "engine/test_kv_transfer.py::test_a_source_with_another_secret_neither_gives_nor_is_believed",
        "engine/test_kv_transfer.py::test_nobody_between_two_machines_reads_a_key_or_kv",
        "cluster/test_settings.py::test_kv_moves_between_replicas_in_all_but_strict_profiles",
    ),
    "disaggregation.mooncake": (
        "engine/test_kv_mooncake.py::test_what_mooncake_carries_cannot_be_read_nor_taken_for_another_part",
        "engine/test_kv_mooncake.py::test_what_a_stranger_changes_is_refused",
        "cluster/test_settings.py::test_only_one_user_may_have_kv_pass_through_ports_that_ask_nobody_who_they_are",
    ),
    "router.standby": (
        "cluster/test_standby.py::test_only_one_that_is_gone_loses_its_place",
        "cluster/test_standby.py::test_who_takes_a_place_is_drawn",
    ),
    "flip.scaling": (
        "cluster/test_scaling.py::test_which_one_goes_is_drawn_by_capacity",
        "cluster/test_scaling.py::test_additions_and_removals_are_counted",
        "cluster/test_settings.py::test_no_load_decides_how_many_replicas_a_strict_profile_has",
    ),
    "priority": (
        "policy/test_gate.py::test_tenant_and_class_come_from_the_credential",
        "policy/test_gate.py::test_a_strict_profile_shows_the_engine_a_class_and_no_tenant",
        "policy/attacks/test_prefix_cache.py::test_the_order_of_answers_does_not_tell_what_another_asked",
    ),
    "prediction": (
        "cluster/test_settings.py::test_no_strict_profile_learns_lengths_of_answers",
        "cluster/test_lengths.py::test_no_prediction_refuses_a_request_while_a_slot_is_free",
    ),
    "router": (
        "cluster/test_routers.py::test_a_scope_of_one_request_leaves_no_trace_in_the_router",
        "cluster/test_routers.py::test_a_draw_follows_capacity_alone",
        "cluster/test_settings.py::test_a_strict_profile_allows_only_a_draw",
    ),
    "router.load": ("cluster/test_routers.py::test_two_scopes_never_share_a_place",),
    "router.slow": (
        "cluster/test_health.py::test_at_most_half_are_left_out",
        "cluster/test_health.py::test_a_replica_with_more_to_do_is_not_slow",
    ),
    "router.placed": (
        "cluster/test_remote_attacks.py::test_frames_of_anybody_else_are_not_read",
        "cluster/test_remote_attacks.py::test_a_host_with_another_certificate_is_not_spoken_to",
    ),
    "router.unit": (
        "e2e/test_sealed_ensemble.py::test_engines_of_two_machines_answer_as_one_and_the_network_reads_nothing",
        "private/test_unit_carriers.py::test_what_is_changed_on_the_way_ends_the_connection_and_the_request_goes_on",
        "private/test_unit_kv.py::test_kv_passes_between_machines_and_the_network_reads_none_of_it",
        "private/test_unit_membership.py::test_a_leader_does_not_start_with_a_member_that_is_not_what_it_is",
        "private/test_unit_membership.py::test_a_member_lends_nothing_to_a_leader_that_is_not_what_it_is",
        "private/test_unit_membership.py::test_a_member_that_was_started_again_is_used_when_no_statement_without_it_is_valid",
        "private/test_unit_pairing.py::test_one_byte_changed_on_the_way_ends_the_pairing",
        "private/test_unit_pairing.py::test_who_shows_a_members_evidence_without_its_key_is_refused",
        "trust/attestation/test_unit_members.py::test_a_client_refuses_a_unit_with_a_machine_that_is_not_what_the_node_is",
    ),
    "flip": (
        "cluster/test_roles.py::test_who_flips_is_drawn_by_capacity_among_the_idle_ones",
        "cluster/test_action_log.py::test_drains_flips_and_updates_are_logged_and_counted",
    ),
    "profiling": (
        "policy/test_counts.py::test_counts_off_the_allow_list_stay_inside",
        "policy/test_counts.py::test_two_readings_that_differ_have_a_threshold_of_requests_between_them",
        "server/test_metrics.py::test_a_strict_profile_lets_out_sums_of_many_requests_only",
    ),
    "profiling.metrics-history": (
        "server/test_metrics_history.py::test_the_last_hour_is_kept_by_the_minute_and_the_day_by_ten",
        "server/test_metrics_history.py::test_the_past_is_read_over_http_and_has_no_label_of_a_request",
    ),
    "profiling.tenant-figures": (
        "server/test_tenants.py::test_an_operator_sees_what_each_tenant_did_and_a_tenant_sees_nothing",
    ),
    "datastore-speculation": (
        "policy/test_speculation.py::test_a_datastore_is_refused_where_nothing_is_read_but_the_request",
        "executor/drafters/test_recycling.py::test_a_departed_sequence_leaves_nothing_and_may_come_back",
    ),
    "datastore-speculation.datastore": (
        "executor/drafters/test_rest.py::test_a_draft_continues_the_longest_suffix_that_the_datastore_has",
    ),
    "speculation": (
        "executor/drafters/test_mtp.py::test_blocks_and_hidden_states_are_overwritten_when_requests_end",
        "policy/test_drafters.py::test_to_let_go_is_not_to_overwrite",
        "trust/shape/test_shape.py::test_paranoid_shows_the_same_whatever_is_said_and_when",
    ),
    "speculation.plain-stream": ("policy/test_speculation.py::test_a_plain_server_that_hides_lengths_has_no_drafts",),
    "speculation.sealed-stream": (
        "trust/shape/test_shape.py::test_private_shows_no_length_of_a_token",
        "trust/shape/test_shape.py::test_tokens_that_come_together_leave_one_by_one_on_ticks",
        "trust/shape/test_shape.py::test_paranoid_sends_a_bucket_of_frames",
    ),
    "speculation.plain-drafts": ("executor/drafters/test_ngram.py::test_a_departed_sequence_leaves_nothing_and_may_come_back",),
    "speculation.sealed-drafts": (
        "policy/test_speculation.py::test_where_nobody_asked_there_are_no_drafts",
        "policy/test_speculation.py::test_a_sealed_node_has_the_drafts_that_are_asked_for",
        "executor/drafters/test_long_spec.py::test_what_a_sequence_leaves_is_overwritten",
    ),
    "tuning": (
        "scheduler/test_budget.py::test_the_cost_of_a_step_is_learned",
        "server/test_metrics.py::test_a_strict_profile_lets_nothing_out_of_what_was_accepted",
    ),
    "receipts": (
        "client/test_receipts.py::test_nobody_gets_a_receipt_who_did_not_ask",
        "client/test_receipts.py::test_a_receipt_tells_nothing_of_the_texts_without_its_salt_and_no_two_are_alike",
        "private/test_receipt_shape.py::test_nobody_on_the_way_can_tell_who_asked_for_a_receipt",
    ),
    "images": (
        "server/test_images.py::test_a_chunk_that_unpacks_to_much_is_refused",
        "executor/test_images.py::test_keys_name_place_length_and_digest_of_every_image",
        "private/test_sealed_images.py::test_inside_a_size_class_a_classifier_finds_none",
        "private/test_sealed_images.py::test_without_a_size_class_nothing_is_sent",
    ),
    "images.remote-images": (
        "server/test_image_fetching.py::test_addresses_that_are_not_the_internets_are_no_targets",
        "server/test_image_fetching.py::test_bytes_are_bounded_whatever_the_header_says",
        "server/test_image_fetching.py::test_time_is_bounded_for_all_images_together",
    ),
    "storage": (
        "server/test_files.py::test_another_tenant_finds_nothing",
        "server/test_files.py::test_nothing_on_the_disk_is_to_be_read_or_told_apart",
        "server/test_files.py::test_routes_of_a_server_that_keeps_nothing_say_so",
    ),
    "storage.responses": (
        "server/test_kept_responses.py::test_another_tenant_goes_on_from_nothing",
        "server/test_kept_responses.py::test_what_is_not_to_be_kept_is_not",
        "server/test_kept_responses.py::test_what_has_had_its_time_is_gone_though_nobody_asks_for_anything",
    ),
    "page-storage": (
        "e2e/test_page_chat.py::test_names_and_folders_are_kept_only_with_the_conversations",
        "e2e/test_page_answers.py::test_a_profile_that_keeps_nothing_neither_reads_nor_writes_what_another_one_kept",
    ),
    "clones": (
        "engine/test_fork_server.py::test_a_template_is_replaced_after_some_crashes",
        "engine/test_fork_server.py::test_a_template_has_one_thread_and_its_forks_are_the_fronts_children",
    ),
    "idle": ("engine/test_idle.py::test_an_engine_is_idle_when_it_had_no_use_for_the_whole_time",),
    "closed-source.runtime-adapters": (
        "e2e/test_adapters.py::test_with_keys_only_an_operators_key_may_change_adapters",
        "e2e/test_adapters.py::test_a_prefix_is_found_with_the_same_weights_only",
    ),
    "closed-source.update": (
        "server/test_replicas.py::test_only_operators_update_replicas_and_strict_profiles_refuse_it",
        "cluster/test_weight_update.py::test_each_answer_is_of_one_weights_and_none_begins_with_the_old_ones_after_the_switch",
    ),
    "priority.identity-tokens": (
        "server/test_oidc.py::test_a_person_is_a_pseudonym_that_no_two_starts_share",
        "server/test_oidc.py::test_no_log_and_no_figure_names_who_asks",
    ),
    "prefix-cache.session": (
        "policy/test_sessions.py::test_the_same_secret_hits_and_another_one_or_none_misses",
        "policy/test_sessions.py::test_a_stolen_secret_opens_nothing_in_another_tenant",
        "scheduler/test_scheduler.py::test_a_session_is_found_again_within_five_minutes_and_wiped_after_them",
    ),
    "prefix-cache.report": (
        "server/test_cache.py::test_each_tenant_sees_and_drops_its_own_only",
        "server/test_cache.py::test_in_private_a_session_sees_its_own_and_a_request_without_one_sees_nothing",
    ),
    "prefix-cache.release": ("e2e/test_release_prefixes.py::test_strangers_share_the_prompt_of_the_release_and_nothing_else",),
    "prefix-cache.documents": (
        "scheduler/test_documents.py::test_another_prefix_or_scope_finds_no_document",
        "server/test_prompt_schemas.py::test_another_tenant_finds_no_schema",
    ),
    "prefix-cache.keyless-bind": ("policy/test_gate.py::test_a_fresh_scope_takes_32_bytes_from_the_random_source",),
    "offload.tier": (
        "policy/attacks/test_kv_tiers.py::test_no_other_key_and_no_other_salt_finds_or_loads_what_a_tenant_sent",
        "policy/attacks/test_kv_tiers.py::test_a_tenant_finds_as_much_of_its_own_whether_or_not_others_fill_the_tiers",
    ),
    "offload.lossy": (
        "policy/attacks/test_kv_tiers.py::test_a_tenant_finds_as_much_of_its_own_whether_or_not_others_fill_the_tiers",
    ),
    "offload.shared-tier": (
        "engine/test_kv_pool.py::test_an_engine_with_another_secret_finds_nothing",
        "engine/test_kv_pool.py::test_a_dropped_scope_is_gone_for_all_engines_when_the_reply_comes",
        "engine/test_kv_pool.py::test_the_part_of_an_engine_that_has_ended_is_wiped_and_its_successor_begins_anew",
    ),
    "offload.peer-tier": ("engine/test_kv_pool.py::test_no_other_scope_finds_or_loads_what_another_engine_keeps",),
    "duplication.replay": ("cluster/test_replay.py::test_what_is_computed_again_has_a_scope_of_its_own",),
}
"""Subject of a rule -> tests that show its mitigations, under `tests/`."""


@cache
def names_in(path: str) -> frozenset[str]:
    """Returns the names of the tests of a file."""
    tree = ast.parse((TESTS / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(node.name for node in functions)


def list_mitigated() -> set[str]:
    """Returns the subjects of rules that allow something under a condition."""
    every = [*(row.rulings for row in ROWS), *(feature.rulings for feature in FEATURES.values())]
    return {
        rulings[profile].rule.removeprefix("T6.").removesuffix(f".{profile}")
        for rulings in every
        for profile in Profile
        if rulings[profile].verdict is Verdict.MITIGATED
    }


def test_every_mitigation_has_a_test_that_shows_it() -> None:
    assert list_mitigated() == set(SHOWN_BY)


@pytest.mark.parametrize("subject", SHOWN_BY)
def test_the_tests_that_show_a_mitigation_exist(subject: str) -> None:
    for test in SHOWN_BY[subject]:
        path, _, name = test.partition("::")
        assert name in names_in(path), test
