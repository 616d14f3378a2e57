// The list of conversations: open, search, rename, put into folders, export, forget.

import { askFor } from "./ask-dialog.js";
import { exportJson, exportMarkdown, importJson, mentions, titleOf } from "./conversation.js";
import { byId, h, icon } from "./dom.js";
import { menuButton } from "./menu.js";

const MIN_SEARCHED = 2;

export class ListView {
  /** @param page what the views share: memory, toast, open(conversation) and changed(). */
  constructor(page) {
    this.page = page;
    this.closed = new Set();
    this.shown = [];
    byId("open-list").addEventListener("click", () => this.toggle());
    byId("shade").addEventListener("click", () => this.toggle(false));
    byId("new-conversation").addEventListener("click", () => page.begin());
    byId("bring-back").addEventListener("click", () => byId("exported").click());
    byId("exported").addEventListener("change", (event) => this.import(event.target));
    byId("search").addEventListener("input", () => this.show());
    byId("search").addEventListener("keydown", (event) => this.leaveSearch(event));
  }

  show() {
    const { memory } = this.page;
    const search = byId("search");
    search.hidden = memory.conversations.length < MIN_SEARCHED && !search.value;
    const words = search.value.trim();
    const found = memory.conversations.filter((conversation) => !words || mentions(conversation, words));
    const folders = [...new Set(found.map(({ folder }) => folder).filter(Boolean))].sort();
    const inside = ["", ...folders].map((name) => found.filter(({ folder }) => folder === name));
    const [loose, ...filed] = inside.map((conversations) => conversations.map((conversation) => this.row(conversation)));
    this.shown = inside.flat();
    byId("conversations").replaceChildren(...loose, ...folders.map((name, i) => this.folder(name, filed[i], words)));
    byId("found-none").textContent = words && !found.length ? "Nothing found." : "";
    byId("keep-note").textContent = memory.settings.keep && memory.mayKeep
      ? "Kept in this browser until you switch that off."
      : "Nothing is kept: closing this page forgets all of it.";
  }

  /** On a narrow screen the list lies over the page. */
  toggle(open = !document.body.classList.contains("list-open")) {
    document.body.classList.toggle("list-open", open);
    byId("open-list").setAttribute("aria-expanded", String(open));
    if (open) byId("new-conversation").focus();
  }

  /** A folder; while something is searched for, every folder is open. */
  folder(name, rows, isSearched) {
    const details = h("details", { open: Boolean(isSearched) || !this.closed.has(name) });
    details.append(h("summary", {}, icon("folder"), h("span", {}, name)), h("ul", {}, ...rows));
    details.addEventListener("toggle", () => !isSearched && (details.open ? this.closed.delete(name) : this.closed.add(name)));
    return h("li", { class: "folder" }, details);
  }

  row(conversation) {
    const { page } = this;
    const isCurrent = conversation === page.memory.current;
    const title = titleOf(conversation);
    const open = h("button", { type: "button", class: "open", onclick: () => page.open(conversation), "aria-current": isCurrent && "true", title }, title);
    const menu = conversation.turns.length ? menuButton(`More: ${title}`, () => this.actions(conversation)) : [];
    return h("li", { class: isCurrent ? "row current" : "row" }, open, ...menu);
  }

  actions(conversation) {
    return [
      ["edit", "Rename", () => this.rename(conversation)],
      ["folder", "Move to a folder", () => this.move(conversation)],
      ["export", "Export", () => this.export(conversation)],
      ["delete", "Forget", () => this.forget(conversation)],
    ];
  }

  rename(conversation) {
    const hint = "Left empty, its first question names it.";
    askFor({ title: "Rename the conversation", label: "Name", hint, value: titleOf(conversation) }, (title) => {
      conversation.title = title === titleOf({ ...conversation, title: "" }) ? "" : title;
      this.page.changed();
    });
  }

  move(conversation) {
    const { folder } = conversation;
    const others = [...new Set(this.page.memory.conversations.map((other) => other.folder))].filter((name) => name && name !== folder).sort();
    const hint = folder ? "Left empty, it is in no folder." : "A new name makes a new folder.";
    askFor({ title: "Move to a folder", label: "Folder", hint, value: folder, action: "Move", choices: others }, (name) => {
      conversation.folder = name;
      this.page.changed();
    });
  }

  forget(conversation) {
    const undo = this.page.memory.forget(conversation);
    this.page.open(this.page.memory.current);
    this.page.toast("The conversation was forgotten.", () => {
      undo();
      this.page.open(conversation);
    });
  }

  leaveSearch(event) {
    if (event.key !== "Escape" || !event.target.value) return;
    event.stopPropagation();
    event.preventDefault();
    event.target.value = "";
    this.show();
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
