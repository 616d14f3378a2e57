// A small dialog that asks for one line of text.

import { showDialog } from "./dialog.js";
import { UNWATCHED, h } from "./dom.js";

/**
 * Asks for a text and gives it to `take`, trimmed; nothing happens when the dialog is closed.
 * @param choices texts that can be picked instead of typed.
 */
export function askFor({ title, label, hint = "", value = "", action = "Save", choices = [] }, take) {
  const input = h("input", { id: "asked", type: "text", maxlength: 100, "aria-describedby": "asked-hint", ...UNWATCHED });
  input.value = value;
  const finish = (text) => {
    close();
    take(text.trim());
  };
  const submit = (event) => {
    event.preventDefault();
    finish(input.value);
  };
  const known = choices.map((text) => h("button", { type: "button", class: "button quiet", onclick: () => finish(text) }, text));
  const field = h("div", { class: "field" }, h("label", { for: "asked" }, label), input, h("p", { class: "hint", id: "asked-hint" }, hint));
  const form = h("form", { onsubmit: submit }, field, h("button", { type: "submit", class: "button" }, action));
  const close = showDialog(title, h("div", { class: "panel-body" }, form, known.length > 0 && h("div", { class: "known" }, ...known)));
  input.select();
}
