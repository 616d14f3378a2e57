// The live board: reads /metrics every second while somebody looks at it, and what the server remembers of before.

import { ApiError } from "./api.js";
import { FleetCard, MemoryCard, PlotCard, SumsCard, TenantsCard } from "./board-cards.js";
import { byId, h } from "./dom.js";
import { explain } from "./errors.js";
import { PLOTS, uptime } from "./figures.js";
import { parseHistory, parseMetrics, valueOf } from "./metrics.js";
import { RANGES, Timeline } from "./readings.js";

const PERIOD_MS = 1000;
const DEADLINE_MS = 10_000;
const UNSEEN_MS = 60_000;

export class BoardView {
  /** @param page what the views share: api, policy and lacksKey. */
  constructor(page) {
    this.page = page;
    this.timelines = RANGES.map((range) => new Timeline(range));
    this.chosen = 0;
    this.isOpen = false;
    this.isPaused = false;
    this.timer = null;
    this.tenants = null;
    this.refusedKey = null;
    document.addEventListener("visibilitychange", () => this.schedule(0));
  }

  /** Shows the board and begins to read, or stops. */
  open(isOpen) {
    this.isOpen = isOpen;
    if (isOpen && !this.status) this.build();
    this.schedule(0);
  }

  build() {
    this.uptime = h("p", { class: "soft" });
    this.status = h("p", { class: "board-status", role: "status" });
    this.buttons = RANGES.map(({ name }, i) => h("button", { type: "button", onclick: () => this.choose(i) }, name));
    const ranges = h("div", { class: "ranges", role: "group", "aria-label": "Time that is shown" }, ...this.buttons);
    this.pause = h("button", { type: "button", class: "button quiet pause", onclick: () => this.togglePause() }, "Pause");
    this.grid = h("div", { class: "cards" });
    const head = h("header", { class: "board-head" }, h("h2", {}, "This server"), this.uptime, this.status, this.isStrict ? null : ranges, this.pause);
    byId("board-view").replaceChildren(h("div", { class: "board-inside" }, head, this.grid));
    this.cards = this.isStrict ? [new SumsCard(this.page.policy.profile)] : [...PLOTS.map((plot) => new PlotCard(plot)), new MemoryCard()];
    this.fleet = new FleetCard();
    this.choose(0);
  }

  /** Whether the profile lets out sums and no more. */
  get isStrict() {
    return this.page.policy.metrics === "counts";
  }

  choose(i) {
    this.chosen = i;
    this.buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === i)));
    this.recompute();
  }

  recompute() {
    for (const card of this.cards) card.forget?.();
    if (this.timelines[0].last) this.draw();
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
    const { api } = this.page;
    if (api.key && api.key === this.refusedKey) {
      this.say("An operator's key shows the figures of this server. Give one in the settings.");
      this.schedule(PERIOD_MS);
      return;
    }
    this.isReading = true;
    const startMs = performance.now();
    try {
      if (this.page.lacksKey) throw new ApiError(401);
      const samples = parseMetrics(await this.fetch("/metrics"));
      await this.take({ samples, atMs: performance.now() });
      await this.readTenants();
      this.say(valueOf(samples, "cloister_engine_healthy") === 0 ? "The engine makes no progress." : "");
      this.draw();
    } catch (error) {
      if (error.status === 403) this.refusedKey = api.key;
      const { title, helps } = explain(error.status === undefined ? { status: 0 } : error);
      this.say(`${title}. ${helps === "key" ? "Give it in the settings." : "Trying again."}`);
    }
    this.isReading = false;
    this.schedule(Math.max(100, PERIOD_MS - (performance.now() - startMs)));
  }

  fetch(path) {
    return this.page.api.text(path, AbortSignal.timeout(DEADLINE_MS));
  }

  /** Keeps a reading, and asks for what happened while nobody looked. */
  async take(reading) {
    const { last } = this.timelines[0];
    const wasUnseen = !last || reading.atMs - last.atMs > UNSEEN_MS;
    for (const timeline of this.timelines) timeline.add(reading);
    if (!wasUnseen || !this.page.policy.metrics_history) return;
    const past = parseHistory(await this.fetch("/metrics/history"), performance.now());
    for (const timeline of this.timelines) timeline.fill(past);
    for (const card of this.cards) card.forget?.();
  }

  /** Reads the figures of tenants where there are some. */
  async readTenants() {
    if (!this.page.policy.tenants) return;
    const { data } = JSON.parse(await this.fetch("/metrics/tenants"));
    this.tenants ??= new TenantsCard();
    this.tenants.show(data);
    if (!this.tenants.element.isConnected) this.grid.append(this.tenants.element);
  }

  draw() {
    if (!this.cards[0].element.isConnected) this.grid.prepend(...this.cards.map((card) => card.element));
    const now = this.timelines[0].moments().at(-1);
    this.uptime.textContent = uptime(now.samples);
    for (const card of this.cards) card.draw({ now, timeline: this.timelines[this.chosen], range: RANGES[this.chosen] });
    if (!this.fleet.draw({ now })) this.fleet.element.remove();
    else if (!this.fleet.element.isConnected) this.grid.prepend(this.fleet.element);
  }

  say(text) {
    if (this.status.textContent !== text) this.status.textContent = text;
  }
}
