// Which model answers: its name in the bar, or a list where several are served.

import { byId, h } from "./dom.js";

export class ModelSwitch {
  /** @param page what the views share: memory, models, served and set(name, value). */
  constructor(page) {
    this.page = page;
    this.box = byId("model");
  }

  show() {
    const { models, served } = this.page;
    if (models.length < 2) return this.say(served);
    const options = models.map((name) => h("option", { value: name, selected: name === served }, name));
    const take = ({ target }) => this.page.set("model", target.value === models[0] ? "" : target.value);
    this.box.replaceChildren(h("select", { id: "choose-model", "aria-label": "Model", onchange: take }, ...options));
  }

  /** Says something in place of a model. */
  say(text) {
    this.box.replaceChildren(h("p", { id: "model-name" }, text));
  }
}
