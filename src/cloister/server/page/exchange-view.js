// The JSON of a turn: what was sent and what came back.

import { showDialog } from "./dialog.js";
import { h } from "./dom.js";
import { jsonTree } from "./json-tree.js";
import { codeBox } from "./render.js";

/** Opens the dialog that shows an exchange. */
export function showExchange({ request, response }) {
  const answer = response.length === 1 ? response[0] : response;
  const events = response.map((chunk) => JSON.stringify(chunk)).join("\n");
  const whole = response.length === 1 ? JSON.stringify(answer, null, 2) : events;
  const title = response.length === 1 ? "Response" : `Response, ${response.length} events`;
  const body = h(
    "div",
    { class: "panel-body" },
    h("h3", {}, "Request"),
    jsonTree(request),
    codeBox(JSON.stringify(request, null, 2), "json", "POST /v1/chat/completions"),
    h("h3", {}, title),
    response.length === 1 ? jsonTree(answer) : null,
    response.length ? codeBox(whole, "json", "as it came") : h("p", { class: "soft" }, "Nothing came back."),
  );
  showDialog("As JSON", body, true);
}
