// The page's dialog for one thing at a time.

import { byId, h, iconButton } from "./dom.js";

/** Opens it with a title and a body; `isWide` where it shows code. Returns what closes it. */
export function showDialog(title, body, isWide = false) {
  const dialog = byId("exchange");
  const close = () => dialog.close();
  dialog.classList.toggle("wide", isWide);
  dialog.replaceChildren(h("header", {}, h("h2", { id: "exchange-title" }, title), iconButton("close", "Close", close)), body);
  dialog.showModal();
  return close;
}
