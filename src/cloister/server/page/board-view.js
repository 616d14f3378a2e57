// The live board: reads /metrics every second while somebody looks at it.

import { ApiError } from "./api.js";
import { byId, h } from "./dom.js";
import { explain } from "./errors.js";
import { History, LENGTH, PLOTS, SUMS, bytes, count, memoryBudget } from "./figures.js";
import { parseMetrics, valueOf } from "./metrics.js";
import { Plot } from "./plot.js";

const PERIOD_MS = 1000;
const DEADLINE_MS = 10_000;

export class BoardView {
  /** @param page what the views share: api, policy and lacksKey. */
  constructor(page) {
    this.page = page;
    this.history = new History();
    this.isOpen = false;
    this.isPaused = false;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.schedule(0));
  }

  /** Shows the board and begins to read, or stops. */
  open(isOpen) {
    this.isOpen = isOpen;
    if (isOpen && !this.status) this.build();
    this.schedule(0);
  }

  build() {
    this.status = h("p", { class: "board-status", role: "status" });
    this.pause = h("button", { type: "button", class: "button quiet", onclick: () => this.togglePause() }, "Pause");
    this.grid = h("div", { class: "cards" });
    const head = h("header", { class: "board-head" }, h("h2", {}, "This server, now"), this.status, this.pause);
    byId("board-view").replaceChildren(h("div", { class: "board-inside" }, head, this.grid));
    this.cards = PLOTS.map((plot) => new PlotCard(plot));
    this.memory = new MemoryCard();
    this.sums = new SumsCard(this.page.policy.profile);
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.textContent = this.isPaused ? "Go on" : "Pause";
    if (this.isPaused) this.say("Paused.");
    this.schedule(0);
  }

  /** Reads again after a while; never while nobody can see it. */
  schedule(afterMs) {
    clearTimeout(this.timer);
    const isWanted = this.isOpen && !this.isPaused && !document.hidden;
    if (isWanted && !this.isReading) this.timer = setTimeout(() => this.read(), afterMs);
  }

  async read() {
    this.isReading = true;
    const startMs = performance.now();
    try {
      if (this.page.lacksKey) throw new ApiError(401);
      const samples = parseMetrics(await this.page.api.text("/metrics", AbortSignal.timeout(DEADLINE_MS)));
      this.history.add(samples, performance.now());
      this.say(valueOf(samples, "cloister_engine_healthy") === 0 ? "The engine is not well: nothing advances." : "");
      this.draw(samples);
    } catch (error) {
      const { title, helps } = explain(error.status === undefined ? { status: 0 } : error);
      this.say(`${title}. ${helps === "key" ? "Give it in the settings." : "Trying again."}`);
    }
    this.isReading = false;
    this.schedule(Math.max(100, PERIOD_MS - (performance.now() - startMs)));
  }

  draw(samples) {
    const cards = this.page.policy.metrics === "counts" ? [this.sums] : [...this.cards, this.memory];
    if (this.grid.childElementCount !== cards.length) this.grid.replaceChildren(...cards.map((card) => card.element));
    for (const card of cards) card.draw(this.history, samples);
  }

  say(text) {
    if (this.status.textContent !== text) this.status.textContent = text;
  }
}

class PlotCard {
  constructor(plot) {
    this.plot = plot;
    this.values = plot.lines.map(() => []);
    this.svg = new Plot(LENGTH - 1, plot.top);
    this.shown = plot.lines.map(() => h("span", { class: "number" }, "–"));
    this.top = h("span", { class: "axis", "aria-hidden": "true" });
    this.note = h("p", { class: "note" });
    const named = plot.lines.map((name, i) => h("p", { class: `figure figure-${i}` }, this.shown[i], h("span", { class: "unit" }, name)));
    const drawing = h("div", { class: "drawing" }, this.top, this.svg.element, h("div", { class: "axis-time", "aria-hidden": "true" }, h("span", {}, "2 minutes ago"), h("span", {}, "now")));
    this.element = h("section", { class: "card", "aria-label": plot.title }, h("h3", {}, plot.title), h("div", { class: "figure-row" }, ...named), drawing, this.note);
  }

  draw(history) {
    const { read, show, lines, title } = this.plot;
    const [values, note] = read(history);
    values.forEach((value, i) => {
      this.values[i].push(value);
      if (this.values[i].length >= LENGTH) this.values[i].shift();
      this.shown[i].textContent = show(value);
    });
    this.note.textContent = note;
    const highest = (list) => show(list.reduce((most, value) => (value !== null && (most === null || value > most) ? value : most), null));
    const words = lines.map((name, i) => `${name} ${show(values[i])}, at most ${highest(this.values[i])}`);
    this.top.textContent = show(this.svg.draw(this.values, `${title}, last two minutes: ${words.join("; ")}`));
  }
}

class MemoryCard {
  constructor() {
    this.total = h("span", { class: "number" }, "–");
    this.bar = h("div", { class: "memory-bar", "aria-hidden": "true" });
    this.legend = h("dl", { class: "legend" });
    const row = h("div", { class: "figure-row" }, h("p", { class: "figure" }, this.total, h("span", { class: "unit" }, "in all")));
    this.element = h("section", { class: "card wide", "aria-label": "Memory budget" }, h("h3", {}, "Memory budget"), row, this.bar, this.legend);
  }

  draw(history) {
    const parts = memoryBudget(history.last);
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

/** All there is under a profile that lets sums out and no more. */
class SumsCard {
  constructor(profile) {
    this.list = h("dl", { class: "sums" });
    const why = `The profile “${profile}” lets out sums only, and new ones only after 20 more requests have ended: no times, no queue, no cache.`;
    this.element = h("section", { class: "card whole", "aria-label": "Sums" }, h("h3", {}, "Sums over many requests"), h("p", { class: "note" }, why), this.list);
  }

  draw(_, samples) {
    const shown = Object.entries(SUMS).map(([name, label]) => [label, valueOf(samples, name)]);
    const none = shown.every(([, value]) => value === null);
    const rows = none ? [h("p", { class: "soft" }, "Nothing has been let out yet.")] : shown.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, count(value))));
    this.list.replaceChildren(...rows);
  }
}
