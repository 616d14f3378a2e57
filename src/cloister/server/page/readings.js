// What the board remembers: readings of /metrics, dense for the last minutes and sparse for the day. Pure.

import { observedBetween, quantileOf, riseOf, valueOf } from "./metrics.js";

const NUM_POINTS = 120;
const GAP_MS = 90_000;

/** The spans of time that can be looked at. */
export const RANGES = [
  { name: "2 min", words: "2 minutes", spanMs: 120_000 },
  { name: "15 min", words: "15 minutes", spanMs: 900_000 },
  { name: "60 min", words: "60 minutes", spanMs: 3_600_000 },
  { name: "Day", words: "24 hours", spanMs: 86_400_000 },
];

/** Readings of one range, the newest last: about 120, whatever the range. */
export class Timeline {
  constructor({ spanMs }) {
    this.spanMs = spanMs;
    this.stepMs = spanMs / NUM_POINTS;
    this.readings = [];
  }

  /** Takes the newest reading. The one before it goes if it is nearer than a step to the one before that. */
  add(reading) {
    const [before, last] = this.readings.slice(-2);
    // A tenth less than the step: a timer that comes a little early must not halve the number of points.
    if (last && last.atMs - before.atMs < this.stepMs * 0.9) this.readings.pop();
    this.readings.push(reading);
    this.forget();
  }

  /** Takes readings of the past where there is none near. */
  fill(past) {
    const kept = [...this.readings];
    for (const reading of past) {
      if (kept.every(({ atMs }) => Math.abs(atMs - reading.atMs) >= this.stepMs * 0.9)) kept.push(reading);
    }
    this.readings = kept.sort((a, b) => a.atMs - b.atMs);
    this.forget();
  }

  /** Forgets what is too old, but the youngest of it: the line goes on to the edge. */
  forget() {
    const oldest = this.last ? this.last.atMs - this.spanMs : 0;
    while (this.readings.length > 1 && this.readings[1].atMs <= oldest) this.readings.shift();
  }

  get last() {
    return this.readings.at(-1);
  }

  /** Returns the moments of this range, from the oldest on, each with what was read before it. */
  moments() {
    return this.readings.map((_, at) => new Moment(this.readings, at, this.stepMs));
  }

  /** Whether nothing was read between a reading and the one before it for so long that no line may join them. */
  isGap(at) {
    return at > 0 && this.readings[at].atMs - this.readings[at - 1].atMs > Math.max(GAP_MS, 3 * this.stepMs);
  }
}

/** One reading, and the ones before it to compare it with. */
export class Moment {
  constructor(readings, at, stepMs) {
    this.readings = readings;
    this.at = at;
    this.stepMs = stepMs;
  }

  get samples() {
    return this.readings[this.at].samples;
  }

  value(name, isWanted) {
    return valueOf(this.samples, name, isWanted);
  }

  /** How fast a counter rises, per second, over so long or a step of the range; null when that is not known. */
  rate(name, spanMs = 0, isWanted = undefined) {
    const then = this.before(spanMs);
    const rise = then && riseOf(then.samples, this.samples, name, isWanted);
    return rise === null ? null : rise / Math.max(0.001, (this.readings[this.at].atMs - then.atMs) / 1000);
  }

  /** What a counter rose by in so long, over what another one did, or null when that did not rise. */
  share(part, whole, spanMs) {
    const then = this.before(spanMs);
    const sum = then && riseOf(then.samples, this.samples, whole);
    return sum ? (riseOf(then.samples, this.samples, part) ?? 0) / sum : null;
  }

  /** The median and the 90th percentile of what a histogram took of late, or nulls. */
  quantiles(name, spanMs) {
    const then = this.before(spanMs);
    const histogram = then && observedBetween(then.samples, this.samples, name);
    return [0.5, 0.9].map((quantile) => (histogram ? quantileOf(histogram, quantile) : null));
  }

  /** The youngest reading that is so much older, a step of the range at least; else the oldest there is. */
  before(spanMs) {
    const limit = this.readings[this.at].atMs - 0.9 * Math.max(spanMs, this.stepMs);
    for (let at = this.at - 1; at >= 0; at -= 1) if (this.readings[at].atMs <= limit || at === 0) return this.readings[at];
    return null;
  }
}
