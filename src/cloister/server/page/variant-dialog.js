// Asks with which other settings an answer shall be given once more.

import { showDialog } from "./dialog.js";
import { h } from "./dom.js";
import { SAMPLING, fieldBox } from "./field.js";
import { describeChanges } from "./presets.js";

/**
 * Opens the dialog.
 * @param page what the views share: memory, models and served.
 * @param take is given the settings, and what is different about them in words.
 */
export function askVariant(page, take) {
  const { settings } = page.memory;
  const changes = {};
  const models = Object.fromEntries(page.models.map((name) => [name, name]));
  const model = { name: "model", label: "Model", kind: "select", options: models };
  const fields = [...(page.models.length > 1 ? [model] : []), ...SAMPLING, { name: "system", label: "System prompt", kind: "area", rows: 3 }];
  const valueOf = ({ name }) => (name === "model" ? page.served : settings[name]);
  const boxes = fields.map((field) => fieldBox(field, valueOf(field), (value) => (changes[field.name] = value), "vary"));
  const submit = (event) => {
    event.preventDefault();
    close();
    take({ ...settings, ...changes }, describeChanges({ ...settings, model: page.served }, changes));
  };
  const note = h("p", { class: "hint" }, "The answer stands beside the one there is, until you choose one. The settings of the page stay.");
  const button = h("button", { type: "submit", class: "button" }, "Answer");
  const close = showDialog("Answer with other settings", h("form", { class: "panel-body", onsubmit: submit }, note, ...boxes, button));
}
