// The list of conversations: open, export, forget.

import { exportJson, exportMarkdown, importJson, titleOf } from "./conversation.js";
import { byId, h, iconButton } from "./dom.js";

export class ListView {
  /** @param page what the views share: memory, toast, open(conversation) and changed(). */
  constructor(page) {
    this.page = page;
    byId("open-list").addEventListener("click", () => this.toggle());
    byId("shade").addEventListener("click", () => this.toggle(false));
    byId("new-conversation").addEventListener("click", () => page.begin());
    byId("bring-back").addEventListener("click", () => byId("exported").click());
    byId("exported").addEventListener("change", (event) => this.import(event.target));
  }

  show() {
    const { memory } = this.page;
    byId("conversations").replaceChildren(...memory.conversations.map((conversation) => this.row(conversation)));
    byId("keep-note").textContent = memory.settings.keep
      ? "Kept in this browser until you switch that off."
      : "Nothing is kept: closing this page forgets all of it.";
  }

  /** On a narrow screen the list lies over the page. */
  toggle(open = !document.body.classList.contains("list-open")) {
    document.body.classList.toggle("list-open", open);
    byId("open-list").setAttribute("aria-expanded", String(open));
    if (open) byId("new-conversation").focus();
  }

  row(conversation) {
    const { page } = this;
    const isCurrent = conversation === page.memory.current;
    const title = titleOf(conversation);
    const open = h("button", { type: "button", class: "open", onclick: () => page.open(conversation), "aria-current": isCurrent && "true" }, title);
    const hasTurns = conversation.turns.length > 0;
    const buttons = [
      iconButton("export", `Export: ${title}`, () => this.export(conversation), { disabled: !hasTurns }),
      iconButton("delete", `Forget: ${title}`, () => this.forget(conversation), { disabled: !hasTurns }),
    ];
    return h("li", { class: isCurrent ? "current" : null }, open, ...(hasTurns ? buttons : []));
  }

  forget(conversation) {
    const undo = this.page.memory.forget(conversation);
    this.page.open(this.page.memory.current);
    this.page.toast("The conversation was forgotten.", () => {
      undo();
      this.page.open(conversation);
    });
  }

  async import(input) {
    const texts = await Promise.all([...input.files].map((file) => file.text()));
    input.value = "";
    const conversations = texts.map(importJson).filter(Boolean);
    for (const conversation of conversations) this.page.memory.add(conversation);
    if (conversations.length) this.page.open(this.page.memory.current);
    if (conversations.length < texts.length) this.page.toast("That is no conversation that this page exported as JSON.");
  }

  export(conversation) {
    const { settings } = this.page.memory;
    const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    const save = (text, type, suffix) => saveFile(text, type, `${name}.${suffix}`);
    this.page.choose("Export this conversation", [
      ["Markdown, for people", () => save(exportMarkdown(conversation, settings), "text/markdown", "md")],
      ["JSON, for programs", () => save(exportJson(conversation, settings, new Date()), "application/json", "json")],
    ]);
  }
}

function saveFile(text, type, name) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
