// What the board shows, worked out from the readings of /metrics that are in memory. Pure.

import { observedBetween, quantileOf, riseOf, valueOf } from "./metrics.js";

export const LENGTH = 121;
const QUANTILES_MS = 15_000;
const HITS_MS = 60_000;

/** Readings of the last two minutes, the newest last. */
export class History {
  constructor() {
    this.readings = [];
  }

  add(samples, atMs) {
    this.readings.push({ samples, atMs });
    if (this.readings.length > LENGTH) this.readings.shift();
  }

  get last() {
    return this.readings.at(-1);
  }

  /** The oldest reading that is no older than so long before the last. */
  before(spanMs) {
    return this.readings.find(({ atMs }) => atMs >= this.last.atMs - spanMs);
  }

  /** How fast a counter rose at the last reading, per second. */
  rate(name) {
    const [then, now] = this.readings.slice(-2);
    if (!now) return null;
    const rise = riseOf(then.samples, now.samples, name);
    return rise === null ? null : rise / Math.max(0.001, (now.atMs - then.atMs) / 1000);
  }

  /** The quantiles of what a histogram took lately, or nulls. */
  quantiles(name) {
    const histogram = observedBetween(this.before(QUANTILES_MS).samples, this.last.samples, name);
    return [0.5, 0.9].map((quantile) => (histogram ? quantileOf(histogram, quantile) : null));
  }

  value(name) {
    return valueOf(this.last.samples, name);
  }
}

/**
 * The plots: a title, the names of the lines, and what `read` makes of the history: a value per line, and a note.
 * `top` is what the axis reaches at least.
 */
export const PLOTS = [
  {
    title: "Tokens per second",
    lines: ["output"],
    top: 10,
    show: count,
    read: (history) => [[history.rate("cloister_generation_tokens_total")], `reading prompts: ${count(history.rate("cloister_prompt_tokens_total"))} tokens/s`],
  },
  {
    title: "Requests",
    lines: ["running", "waiting"],
    top: 4,
    show: count,
    read: (history) => [["running", "waiting"].map((name) => history.value(`cloister_num_requests_${name}`)), endings(history)],
  },
  {
    title: "KV cache in use",
    lines: ["in use"],
    top: 0.01,
    show: percent,
    read: (history) => [[history.value("cloister_kv_cache_usage_perc")], blocks(history)],
  },
  {
    title: "Prefix hits",
    lines: ["last minute"],
    top: 1,
    show: percent,
    read: (history) => [[hits(history)], allHits(history)],
  },
  {
    title: "Drafts accepted",
    lines: ["last minute"],
    top: 1,
    show: percent,
    read: (history) => [[accepted(history)], allDrafts(history)],
  },
  {
    title: "Time to first token",
    lines: ["p50", "p90"],
    top: 0.05,
    show: seconds,
    read: (history) => [history.quantiles("cloister_time_to_first_token_seconds"), "of requests that ended in the last 15 s"],
  },
  {
    title: "Time between tokens",
    lines: ["p50", "p90"],
    top: 0.01,
    show: seconds,
    read: (history) => [history.quantiles("cloister_inter_token_latency_seconds"), "of tokens in the last 15 s"],
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
export function memoryBudget({ samples }) {
  const parts = samples.get("cloister_memory_budget_bytes") ?? [];
  return parts.map(({ labels, value }) => [labels.part, value]).sort(([, a], [, b]) => b - a);
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
  const [size, unit] = value >= 2 ** 30 ? [value / 2 ** 30, "GiB"] : [value / 2 ** 20, "MiB"];
  return `${size >= 10 ? Math.round(size).toLocaleString("en") : size.toFixed(1)} ${unit}`;
}

function hits(history) {
  const then = history.before(HITS_MS).samples;
  const asked = riseOf(then, history.last.samples, "cloister_prefix_cache_queries_total");
  return asked ? riseOf(then, history.last.samples, "cloister_prefix_cache_hits_total") / asked : null;
}

function allHits(history) {
  const asked = history.value("cloister_prefix_cache_queries_total");
  const found = history.value("cloister_prefix_cache_hits_total");
  return asked ? `since the start: ${percent(found / asked)} of ${count(asked)} prompt tokens` : "no prompt yet";
}

function accepted(history) {
  const then = history.before(HITS_MS).samples;
  const drafted = riseOf(then, history.last.samples, "cloister_spec_decode_num_draft_tokens_total");
  return drafted ? riseOf(then, history.last.samples, "cloister_spec_decode_num_accepted_tokens_total") / drafted : null;
}

function allDrafts(history) {
  const drafts = history.value("cloister_spec_decode_num_drafts_total");
  if (!drafts) return "nothing drafted yet";
  const tokens = 1 + history.value("cloister_spec_decode_num_accepted_tokens_total") / drafts;
  return `since the start: ${tokens.toFixed(2)} tokens for each draft`;
}

function blocks(history) {
  const parts = history.last.samples.get("cloister_kv_blocks") ?? [];
  return parts.length ? `${parts.map(({ labels, value }) => `${count(value)} ${labels.state}`).join(", ")} blocks` : "no step yet";
}

function endings(history) {
  const parts = history.last.samples.get("cloister_request_success_total") ?? [];
  const ended = parts.filter(({ value }) => value > 0).map(({ labels, value }) => `${count(value)} ${labels.finished_reason}`);
  return ended.length ? `ended: ${ended.join(", ")}` : "none has ended yet";
}
