// The box that a turn's text is changed in.

import { UNWATCHED, h } from "./dom.js";

const MAX_ROWS = 16;

/** Returns the form and its box. Enter or the button saves, Esc or the other button cancels. */
export function editForm({ label, text, action }, save, cancel) {
  const rows = Math.min(MAX_ROWS, text.split("\n").length + 1);
  const area = h("textarea", { "aria-label": label, rows, ...UNWATCHED });
  area.value = text;
  const submit = (event) => {
    event.preventDefault();
    save(area.value);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  const buttons = [
    h("button", { type: "submit", class: "button" }, action),
    h("button", { type: "button", class: "button quiet", onclick: cancel }, "Cancel"),
  ];
  const form = h("form", { class: "edit", onsubmit: submit }, area, h("div", { class: "edit-buttons" }, ...buttons));
  return { form, area };
}
