// The cards of the board: each shows its part of what was read.

import { h } from "./dom.js";
import { SUMS, bytes, count, memoryBudget } from "./figures.js";
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
    const why = `The profile “${profile}” lets out sums only, and new ones only after 20 more requests have ended: no times, no queue, no cache, no past.`;
    this.element = h("section", { class: "card whole", "aria-label": "Sums" }, h("h3", {}, "Sums over many requests"), h("p", { class: "note" }, why), this.list);
  }

  draw({ now }) {
    const shown = Object.entries(SUMS).map(([name, label]) => [label, valueOf(now.samples, name)]);
    const none = shown.every(([, value]) => value === null);
    const rows = none ? [h("p", { class: "soft" }, "Nothing has been let out yet.")] : shown.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, count(value))));
    this.list.replaceChildren(...rows);
  }
}
