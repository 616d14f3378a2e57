// The JSON of a turn: what was sent and what came back.

import { byId, h, iconButton } from "./dom.js";
import { jsonTree } from "./json-tree.js";
import { codeBox } from "./render.js";

/** Opens the dialog that shows an exchange. */
export function showExchange({ request, response }) {
  const dialog = byId("exchange");
  const answer = response.length === 1 ? response[0] : response;
  const events = response.map((chunk) => JSON.stringify(chunk)).join("\n");
  const whole = response.length === 1 ? JSON.stringify(answer, null, 2) : events;
  const title = response.length === 1 ? "Response" : `Response, ${response.length} events`;
  dialog.replaceChildren(
    h("header", {}, h("h2", { id: "exchange-title" }, "As JSON"), iconButton("close", "Close", () => dialog.close())),
    h(
      "div",
      { class: "panel-body" },
      h("h3", {}, "Request"),
      jsonTree(request),
      codeBox(JSON.stringify(request, null, 2), "json", "POST /v1/chat/completions"),
      h("h3", {}, title),
      response.length === 1 ? jsonTree(answer) : null,
      response.length ? codeBox(whole, "json", "as it came") : h("p", { class: "soft" }, "Nothing came back."),
    ),
  );
  dialog.showModal();
}
