// What the cards of the board show, worked out from readings. Pure.

import { valueOf } from "./metrics.js";

const QUANTILES_MS = 15_000;
const MINUTE_MS = 60_000;
const CPU_MS = 4000;
const REPLIES = "cloister_http_replies_total";
const DRAFTS = "cloister_spec_decode_num";

/**
 * The plots: a title, the names of the lines, and what `read` makes of a moment: a value for each line, and `note` a sentence.
 * `top` is what the axis reaches at least; its top is a round number of `unit`, 1 where it is not given.
 */
export const PLOTS = [
  {
    title: "Tokens per second",
    lines: ["output"],
    top: 10,
    show: count,
    read: (moment) => [moment.rate("cloister_generation_tokens_total")],
    note: (moment) => `reading prompts: ${count(moment.rate("cloister_prompt_tokens_total"))} tokens/s`,
  },
  {
    title: "Requests",
    lines: ["running", "waiting"],
    top: 4,
    show: count,
    read: (moment) => ["running", "waiting"].map((name) => moment.value(`cloister_num_requests_${name}`)),
    note: () => "in the engine now",
  },
  {
    title: "Answers per minute",
    lines: ["ended"],
    top: 10,
    show: count,
    read: (moment) => [perMinute(moment, "cloister_request_success_total")],
    note: ({ samples }) => endings(samples),
  },
  {
    title: "Errors per minute",
    lines: ["errors (5xx)", "refused (429)"],
    top: 4,
    show: count,
    read: (moment) => [/^5/, /^429/].map((statuses) => perMinute(moment, REPLIES, ({ status }) => statuses.test(status)) ?? 0),
    note: ({ samples }) => failures(samples),
  },
  {
    title: "Time in the queue",
    lines: ["p50", "p90"],
    top: 0.01,
    show: seconds,
    read: (moment) => moment.quantiles("cloister_request_queue_time_seconds", QUANTILES_MS),
    note: () => "of requests that began in the last 15 s",
  },
  {
    title: "Time to first token",
    lines: ["p50", "p90"],
    top: 0.05,
    show: seconds,
    read: (moment) => moment.quantiles("cloister_time_to_first_token_seconds", QUANTILES_MS),
    note: () => "of requests that ended in the last 15 s",
  },
  {
    title: "Time between tokens",
    lines: ["p50", "p90"],
    top: 0.01,
    show: seconds,
    read: (moment) => moment.quantiles("cloister_inter_token_latency_seconds", QUANTILES_MS),
    note: () => "of tokens in the last 15 s",
  },
  {
    title: "KV cache in use",
    lines: ["in use"],
    top: 0.01,
    show: percent,
    read: (moment) => [moment.value("cloister_kv_cache_usage_perc")],
    note: ({ samples }) => [blocks(samples), ...tiers(samples)].join("; "),
  },
  {
    title: "Prefix hits",
    lines: ["last minute"],
    top: 1,
    show: percent,
    read: (moment) => [moment.share("cloister_prefix_cache_hits_total", "cloister_prefix_cache_queries_total", MINUTE_MS)],
    note: allHits,
  },
  {
    title: "Drafts accepted",
    lines: ["last minute"],
    top: 1,
    show: percent,
    read: (moment) => [moment.share(`${DRAFTS}_accepted_tokens_total`, `${DRAFTS}_draft_tokens_total`, MINUTE_MS)],
    note: allDrafts,
  },
  {
    title: "Processors in use",
    lines: ["engine", "front"],
    top: 1,
    show: cores,
    read: (moment) => ["engine", "front"].map((process) => moment.rate("cloister_process_cpu_seconds_total", CPU_MS, of(process))),
    note: () => "1 is one processor, fully busy",
  },
  {
    title: "Memory of the processes",
    lines: ["engine", "front"],
    top: 2 ** 26,
    unit: 2 ** 20,
    show: bytes,
    read: (moment) => ["engine", "front"].map((process) => moment.value("cloister_process_memory_bytes", of(process))),
    note: () => "resident memory, files that they have mapped included",
  },
];

/** The sums that a strict profile lets out, with their names for people. */
export const SUMS = {
  cloister_requests_total: "Requests",
  cloister_prompt_tokens_total: "Prompt tokens",
  cloister_generation_tokens_total: "Output tokens",
  cloister_steps_total: "Steps",
  cloister_num_preemptions_total: "Preemptions",
};

/** Returns the memory budget as pairs of part and bytes, the largest first. */
export function memoryBudget(samples) {
  const parts = samples.get("cloister_memory_budget_bytes") ?? [];
  return parts.map(({ labels, value }) => [labels.part, value]).sort(([, a], [, b]) => b - a);
}

/** Returns the replicas by index, each with its role, state, load and what it did since the start; none where there is one engine. */
export function replicas(samples) {
  const found = samples.get("cloister_replica_role") ?? [];
  return found.map(({ labels: { replica, role } }) => {
    const is = (labels) => labels.replica === replica;
    const figure = (name) => valueOf(samples, `cloister_replica_${name}`, is) ?? 0;
    const state = samples.get("cloister_replica_state")?.find(({ labels }) => is(labels))?.labels.state;
    const waiting = figure("waiting");
    const load = { running: figure("requests") - waiting, waiting, kv: figure("kv_cache_usage_perc") };
    return { replica, role, state, ...load, routed: figure("routed_total"), moved: figure("migrated_total"), loads: figure("kv_loads_total") };
  });
}

/** Returns for how long the server has run, in words; nothing when it does not say. */
export function uptime(samples) {
  const value = valueOf(samples, "cloister_uptime_seconds");
  if (value === null) return "";
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `up ${Math.floor(value)} s`;
  if (minutes < 60) return `up ${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `up ${hours} h ${minutes % 60} min` : `up ${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function count(value) {
  if (value === null) return "–";
  return value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function percent(value) {
  return value === null ? "–" : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

export function seconds(value) {
  if (value === null) return "–";
  return value >= 1 ? `${value.toFixed(1)} s` : `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
}

export function bytes(value) {
  if (value === null) return "–";
  const [size, unit] = value >= 2 ** 30 ? [value / 2 ** 30, "GiB"] : [value / 2 ** 20, "MiB"];
  return `${size >= 10 ? Math.round(size).toLocaleString("en") : size.toFixed(1)} ${unit}`;
}

function cores(value) {
  return value === null ? "–" : value.toFixed(value < 10 ? 2 : 1);
}

/** Chooses what is labelled with a process: the front, or all engines, which are numbered where there are several. */
function of(name) {
  return ({ process }) => process.replace(/ \d+$/, "") === name;
}

function perMinute(moment, name, isWanted) {
  const rate = moment.rate(name, MINUTE_MS, isWanted);
  return rate === null ? null : rate * 60;
}

function allHits(moment) {
  const asked = moment.value("cloister_prefix_cache_queries_total");
  const found = moment.value("cloister_prefix_cache_hits_total");
  return asked ? `since the start: ${percent(found / asked)} of ${count(asked)} prompt tokens` : "no prompt yet";
}

function allDrafts(moment) {
  const drafts = moment.value(`${DRAFTS}_drafts_total`);
  if (!drafts) return "nothing drafted yet";
  const tokens = 1 + moment.value(`${DRAFTS}_accepted_tokens_total`) / drafts;
  return `since the start: ${tokens.toFixed(2)} tokens for each draft`;
}

function blocks(samples) {
  const parts = samples.get("cloister_kv_blocks") ?? [];
  return parts.length ? `${parts.map(({ labels, value }) => `${count(value)} ${labels.state}`).join(", ")} blocks` : "no step yet";
}

/** What tiers hold, which operators alone are told. */
function tiers(samples) {
  return (samples.get("cloister_kv_tier_used_bytes") ?? []).map(({ labels: { tier }, value }) => {
    // A load of several tiers is labelled with all of them, such as host+disk, and counts for each.
    const figure = (name) => valueOf(samples, `cloister_kv_${name}`, (labels) => labels.tier.split("+").includes(tier)) ?? 0;
    return `${tier}: ${bytes(value)}, ${count(figure("loads_total"))} loads, the oldest block of ${seconds(figure("tier_oldest_seconds"))}`;
  });
}

function endings(samples) {
  const parts = samples.get("cloister_request_success_total") ?? [];
  const ended = parts.filter(({ value }) => value > 0).map(({ labels, value }) => `${count(value)} ${labels.finished_reason}`);
  return ended.length ? `since the start: ${ended.join(", ")}` : "none has ended yet";
}

function failures(samples) {
  const counts = new Map();
  for (const { labels, value } of samples.get(REPLIES) ?? []) {
    if (labels.status >= "400") counts.set(labels.status, (counts.get(labels.status) ?? 0) + value);
  }
  const shown = [...counts].sort().map(([status, value]) => `${count(value)} × ${status}`);
  return shown.length ? `since the start: ${shown.join(", ")}` : "every reply so far was fine";
}
