// The cards of the board: each shows its part of what was read.

import { h } from "./dom.js";
import { SUMS, bytes, count, memoryBudget, percent, replicas } from "./figures.js";
import { valueOf } from "./metrics.js";
import { Plot } from "./plot.js";

/** One of the plots: its figures now, and their lines over a range of time. */
export class PlotCard {
  constructor(plot) {
    this.plot = plot;
    this.svg = new Plot(plot.top, plot.unit);
    this.shown = plot.lines.map(() => h("span", { class: "number" }, "–"));
    this.top = h("span", { class: "axis", "aria-hidden": "true" });
    this.from = h("span", {});
    this.note = h("p", { class: "note" });
    const named = plot.lines.map((name, i) => h("p", { class: `figure figure-${i}` }, this.shown[i], h("span", { class: "unit" }, name)));
    const times = h("div", { class: "axis-time", "aria-hidden": "true" }, this.from, h("span", {}, "now"));
    const drawing = h("div", { class: "drawing" }, this.top, this.svg.element, times);
    this.element = h("section", { class: "card", "aria-label": plot.title }, h("h3", {}, plot.title), h("div", { class: "figure-row" }, ...named), drawing, this.note);
    this.forget();
  }

  /** Works out every value anew at the next drawing. */
  forget() {
    this.values = new WeakMap();
  }

  /**
   * @param now the newest moment, dense enough for the figures of this very second.
   * @param timeline of the range that is drawn.
   */
  draw({ now, timeline, range }) {
    const { read, note, show, lines, title } = this.plot;
    const current = read(now);
    current.forEach((value, i) => (this.shown[i].textContent = show(value)));
    this.note.textContent = note(now);
    this.from.textContent = `${range.words} ago`;
    const points = this.points(timeline);
    const highest = lines.map((_, i) => points.reduce((most, { values }) => larger(most, values[i]), null));
    const words = lines.map((name, i) => `${name} ${show(current[i])}, at most ${show(larger(highest[i], current[i]))}`);
    this.top.textContent = show(this.svg.draw(points, `${title}, last ${range.words}: ${words.join("; ")}`));
  }

  points(timeline) {
    const { spanMs, last } = timeline;
    return timeline.moments().map((moment, i) => {
      const reading = timeline.readings[i];
      if (!this.values.has(reading)) this.values.set(reading, this.plot.read(moment));
      return { at: 1 - (last.atMs - reading.atMs) / spanMs, values: this.values.get(reading), isGap: timeline.isGap(i) };
    });
  }
}

function larger(one, other) {
  return one === null || (other !== null && other > one) ? other : one;
}

/** What the memory budget of the start is for. */
export class MemoryCard {
  constructor() {
    this.total = h("span", { class: "number" }, "–");
    this.bar = h("div", { class: "memory-bar", "aria-hidden": "true" });
    this.legend = h("dl", { class: "legend" });
    const row = h("div", { class: "figure-row" }, h("p", { class: "figure" }, this.total, h("span", { class: "unit" }, "in all")));
    this.element = h("section", { class: "card whole", "aria-label": "Memory budget" }, h("h3", {}, "Memory budget"), row, this.bar, this.legend);
  }

  draw({ now }) {
    const parts = memoryBudget(now.samples);
    const key = parts.join();
    if (key === this.drawn) return;
    this.drawn = key;
    this.total.textContent = bytes(parts.reduce((sum, [, size]) => sum + size, 0));
    this.bar.replaceChildren(...parts.map(([, size], i) => this.part(size, i)));
    this.legend.replaceChildren(...parts.map(([name, size], i) => h("div", {}, h("dt", {}, h("i", { class: `part-${i % 6}` }), name), h("dd", {}, bytes(size)))));
  }

  part(size, i) {
    const part = h("span", { class: `part-${i % 6}` });
    part.style.flexGrow = String(size);
    return part;
  }
}

const STATES = { running: "state well", idle: "state", starting: "state", draining: "state", drained: "state", stopping: "state", stopped: "state", standby: "state" };

/** The fleet: every replica with its role, state and load, where there are several. */
export class FleetCard {
  constructor() {
    this.list = h("ul", { class: "fleet" });
    this.element = h("section", { class: "card whole", "aria-label": "Replicas" }, h("h3", {}, "Replicas"), this.list);
  }

  /** Returns whether there is something to show. */
  draw({ now }) {
    const found = replicas(now.samples);
    const key = JSON.stringify(found);
    if (key !== this.drawn) {
      this.drawn = key;
      const most = Math.max(4, ...found.map(({ running, waiting }) => running + waiting));
      this.list.replaceChildren(...found.map((one) => this.tile(one, most)));
    }
    return found.length > 0;
  }

  tile({ replica, role, state, running, waiting, kv, routed, moved, loads }, most) {
    const head = h("p", { class: "replica-head" }, h("b", {}, `Replica ${replica}`), h("span", { class: "role" }, role), h("span", { class: STATES[state] ?? "state unwell" }, state));
    const load = bar("Requests", `${count(running)} running, ${count(waiting)} waiting`, [running / most, waiting / most]);
    const memory = bar("KV", `${percent(kv)} in use`, [kv]);
    const past = [`${count(routed)} requests so far`, moved ? `${count(moved)} moved here` : "", loads ? `KV came ${count(loads)} ×` : ""];
    return h("li", { class: "replica" }, head, load, memory, h("p", { class: "note" }, past.filter(Boolean).join(", ")));
  }
}

/** Returns a bar with its name and figures; a part of 1 fills it. */
function bar(name, words, parts) {
  const filled = parts.map((part, i) => {
    const element = h("i", { class: `fill-${i}` });
    element.style.width = `${100 * Math.min(1, part)}%`;
    return element;
  });
  return h("div", { class: "gauge" }, h("p", {}, h("span", {}, name), h("span", {}, words)), h("div", { class: "gauge-bar", "aria-hidden": "true" }, ...filled));
}

/** What each tenant did since the start, for operators. */
export class TenantsCard {
  constructor() {
    const names = ["Tenant", "Running", "Waiting", "Requests", "Prompt tokens", "Output tokens"];
    this.rows = h("tbody", {});
    const head = h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)));
    const table = h("div", { class: "tenants", role: "region", tabindex: 0, "aria-label": "Figures of tenants" }, h("table", {}, h("thead", {}, head), this.rows));
    this.element = h("section", { class: "card whole", "aria-label": "Tenants" }, h("h3", {}, "Tenants, since the server started"), table);
  }

  /** @param tenants as `/metrics/tenants` has them. */
  show(tenants) {
    const figures = ({ running, waiting, requests, prompt_tokens, generation_tokens }) => [running, waiting, requests, prompt_tokens, generation_tokens];
    const row = (one) => h("tr", {}, h("th", { scope: "row" }, one.name ?? "all others"), ...figures(one).map((value) => h("td", {}, count(value))));
    this.rows.replaceChildren(...tenants.map(row));
  }
}

/** All there is under a profile that lets sums out and no more. */
export class SumsCard {
  constructor(profile) {
    this.list = h("dl", { class: "sums" });
    const why = `The profile “${profile}” shows sums only, and new ones only after 20 more requests have ended: no times, queue, cache or history.`;
    this.element = h("section", { class: "card whole", "aria-label": "Sums" }, h("h3", {}, "Sums over many requests"), h("p", { class: "note" }, why), this.list);
  }

  draw({ now }) {
    const shown = Object.entries(SUMS).map(([name, label]) => [label, valueOf(now.samples, name)]);
    const none = shown.every(([, value]) => value === null);
    const rows = none ? [h("p", { class: "soft" }, "No sums are available yet.")] : shown.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, count(value))));
    this.list.replaceChildren(...rows);
  }
}
