// Keys that work everywhere on the page, and the dialog that lists them.

import { byId, h, iconButton } from "./dom.js";

const SHOWN = { Escape: "Esc", ArrowUp: "↑", ArrowDown: "↓" };
const IN_THE_BOX = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
];

export class Shortcuts {
  /** @param keys lists of key, what it does in words, and what does it. Keys with Alt work while typing too. */
  constructor(keys) {
    this.keys = keys;
    this.dialog = byId("shortcuts");
    byId("open-shortcuts").addEventListener("click", () => this.open());
    addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    if (event.isComposing || event.ctrlKey || event.metaKey || document.querySelector("dialog[open], :popover-open")) return;
    const isTyping = event.target.matches?.("input, textarea, select");
    const name = `${event.altKey ? "Alt " : ""}${event.altKey ? event.code.replace(/^Key/, "") : event.key}`;
    const found = this.keys.find(([key]) => key === name);
    if (!found || (isTyping && !event.altKey && event.key !== "Escape")) return;
    event.preventDefault();
    found[2]();
  }

  open() {
    const row = ([key, label]) => h("div", {}, h("dt", {}, ...key.split(" ").map((part) => h("kbd", {}, SHOWN[part] ?? part))), h("dd", {}, label));
    this.dialog.replaceChildren(
      h("header", {}, h("h2", { id: "shortcuts-title" }, "Keyboard"), iconButton("close", "Close", () => this.dialog.close())),
      h("dl", { class: "panel-body keys" }, ...[...IN_THE_BOX, ...this.keys].map(row)),
    );
    this.dialog.showModal();
  }
}
