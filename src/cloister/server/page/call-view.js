// A tool call: its name, how far it is, its arguments as a tree, and a box for its result, which the user gives by hand.

import { UNWATCHED, h } from "./dom.js";
import { jsonTree } from "./json-tree.js";
import { parseJson } from "./settings.js";

/**
 * Returns the view of a call.
 * @param isComing whether the model is still writing it.
 * @param onanswer called with the result; without it the call is not waiting for one.
 */
export function callView(call, isComing, onanswer = null) {
  const { name, arguments: text } = call.function;
  const parsed = parseJson(text);
  const shown = parsed === undefined ? h("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, text) : jsonTree(parsed);
  const state = isComing ? "writing its arguments…" : onanswer ? "waits for its result" : "";
  const head = h("p", { class: "call-name" }, "Calls ", h("code", {}, name || "…"), h("span", { class: "soft" }, state && ` ${state}`));
  return h("section", { class: "call", "aria-label": `Tool call ${name}` }, head, shown, onanswer && resultForm(call, onanswer));
}

function resultForm(call, onanswer) {
  const id = `result-${call.id}`;
  const area = h("textarea", { id, rows: 2, placeholder: '{"result": …}', ...UNWATCHED });
  const send = (event) => {
    event.preventDefault();
    onanswer(call, area.value);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  area.addEventListener("keydown", keys);
  const button = h("button", { type: "submit", class: "button" }, "Give result");
  return h("form", { class: "call-result", onsubmit: send }, h("label", { for: id }, "Result of this call"), area, button);
}
