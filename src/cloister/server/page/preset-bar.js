// The first row of the settings: a preset to begin with, and buttons that save and remove one's own.

import { h } from "./dom.js";
import { askFor } from "./ask-dialog.js";
import { selectBox } from "./field.js";
import { BUILT_IN, presetOf, valuesOf, withPreset, withoutPreset } from "./presets.js";

const CHANGED = "Your own settings";

/**
 * Returns the row.
 * @param page what the views share: memory and set(name, value).
 * @param redraw shows the settings anew.
 */
export function presetBar(page, redraw) {
  const { settings } = page.memory;
  const { presets } = settings;
  const names = [...presets, ...BUILT_IN].map(({ name }) => name);
  const current = presetOf(settings);
  const options = Object.fromEntries([...(current ? [] : [["", CHANGED]]), ...names.map((name) => [name, name])]);
  const select = selectBox(options, current, "set-preset");
  select.addEventListener("change", () => {
    for (const [name, value] of Object.entries(valuesOf(settings, select.value))) page.set(name, value);
    redraw();
  });
  const keep = (name) => {
    if (name) page.set("presets", withPreset(page.memory.settings, name));
    redraw();
  };
  const ask = { title: "Save as a preset", label: "Name", hint: "Holds the system prompt and how answers are drawn." };
  const save = h("button", { type: "button", class: "text-button", onclick: () => askFor(ask, keep) }, "Save as preset");
  const drop = () => {
    page.set("presets", withoutPreset(page.memory.settings, current));
    redraw();
  };
  const isOwn = presets.some(({ name }) => name === current);
  const remove = isOwn && h("button", { type: "button", class: "text-button", onclick: drop }, `Remove “${current}”`);
  return h("div", { class: "field select" }, h("label", { for: "set-preset" }, "Preset"), select, h("div", { class: "field-buttons" }, save, remove));
}
