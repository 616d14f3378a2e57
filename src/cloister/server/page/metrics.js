// The figures of /metrics: the text format of Prometheus, and rates and quantiles of what changed between two readings. Pure.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Returns the samples of a reading by name: lists of labels and value. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    const list = samples.get(found[1]) ?? [];
    list.push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
    samples.set(found[1], list);
  }
  return samples;
}

/**
 * Returns the readings of /metrics/history, oldest first, each with its samples and when it was taken.
 * @param nowMs of the clock of `atMs`: the server says how old a reading is, not when it was.
 */
export function parseHistory(text, nowMs) {
  const { series, readings } = JSON.parse(text);
  return readings.map(({ age_s, values }) => {
    const lines = values.map((value, i) => (value === null ? "" : `${series[i]} ${value}`));
    return { samples: parseMetrics(lines.join("\n")), atMs: nowMs - age_s * 1000 };
  });
}

/** Returns the sum of a figure over its labels, those that are wanted, or null when there is no such figure. */
export function valueOf(samples, name, isWanted = () => true) {
  const list = samples.get(name)?.filter(({ labels }) => isWanted(labels));
  return list?.length ? list.reduce((sum, { value }) => sum + value, 0) : null;
}

/**
 * Returns by how much a counter rose from one reading to another, over all its labels that are wanted. What was started again
 * counts from nothing; one of several engines is, so each series counts for itself.
 */
export function riseOf(before, after, name, isWanted = () => true) {
  const list = after.get(name)?.filter(({ labels }) => isWanted(labels));
  if (!list?.length) return null;
  const key = ({ labels }) => JSON.stringify(labels);
  const then = new Map(before.get(name)?.map((sample) => [key(sample), sample.value]));
  const rises = list.map((sample) => [sample.value, then.get(key(sample)) ?? 0]).map(([now, old]) => (now >= old ? now - old : now));
  return rises.reduce((sum, rise) => sum + rise, 0);
}

/** Returns the histogram of what was observed between two readings: upper bounds and counts, or null when nothing was. */
export function observedBetween(before, after, name) {
  const old = bucketsOf(before, name);
  const buckets = [...bucketsOf(after, name)].sort(([a], [b]) => a - b);
  const rises = buckets.map(([bound, count]) => ({ bound, count: Math.max(0, count - (old.get(bound) ?? 0)) }));
  return rises.length && rises.at(-1).count > 0 ? rises : null;
}

/** Returns a quantile of a histogram, linear inside its bucket as Prometheus has it. */
export function quantileOf(histogram, quantile) {
  const rank = quantile * histogram.at(-1).count;
  const at = histogram.findIndex(({ count }) => count >= rank);
  const below = at > 0 ? histogram[at - 1] : { bound: 0, count: 0 };
  const { bound, count } = histogram[at];
  if (!Number.isFinite(bound)) return below.bound;
  return below.bound + ((bound - below.bound) * (rank - below.count)) / Math.max(1, count - below.count);
}

function bucketsOf(samples, name) {
  const buckets = new Map();
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + value);
  }
  return buckets;
}
