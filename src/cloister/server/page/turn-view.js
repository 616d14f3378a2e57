// One turn on the screen: text, reasoning, tool calls, what went wrong, figures, and what can be done with it.

import { describeFigures } from "./answer.js";
import { callView } from "./call-view.js";
import { speaker } from "./conversation.js";
import { UNWATCHED, h, iconButton, setChildren } from "./dom.js";
import { jsonTree } from "./json-tree.js";
import { MarkdownView, copyButton } from "./render.js";
import { parseJson } from "./settings.js";

const LONGEST_COUNT_S = 300;

/**
 * Shows a turn, and shows it again when `update` is called.
 *
 * `does` are the actions of the chat: edit(turn, text), retry(turn), show(turn), answerCall(call, text), useKey(turn, key),
 * isOpen(call).
 */
export class TurnView {
  constructor(turn, does) {
    this.turn = turn;
    this.does = does;
    this.text = new MarkdownView();
    this.calls = new Map();
    this.isEditing = false;
    this.body = h("div", { class: "turn-body" });
    this.foot = h("div", { class: "turn-foot" });
    this.article = h("article", { class: `turn ${turn.role}`, "aria-label": speaker(turn) }, this.body, this.foot);
    this.element = h("li", {}, this.article);
    this.update();
  }

  /** Draws the turn as it is now; what did not change keeps its nodes. */
  update() {
    const { turn } = this;
    if (this.isEditing) return;
    const isComing = turn.state === "waiting" || turn.state === "streaming";
    this.article.toggleAttribute("data-coming", isComing);
    this.article.setAttribute("aria-busy", String(isComing));
    setChildren(this.body, this.parts(isComing));
    setChildren(this.foot, isComing ? [] : this.footParts());
  }

  parts(isComing) {
    const { turn } = this;
    const said = h("p", { class: "said" }, turn.content);
    if (turn.role === "tool") return [h("p", { class: "caption" }, speaker(turn)), said];
    if (turn.role === "user") return [said];
    const parts = [this.reasoning(isComing), this.answer(), ...this.callViews(isComing), this.fault()];
    if (turn.state === "waiting") parts.push(waiting());
    if (turn.state === "stopped") parts.push(h("p", { class: "soft" }, "Stopped."));
    if (turn.state === "done" && !turn.content && !turn.toolCalls.length) parts.push(h("p", { class: "soft" }, "The model said nothing."));
    return parts.filter(Boolean);
  }

  /** The answer as text, or as a tree when it is JSON as a whole. */
  answer() {
    const { content, state } = this.turn;
    if (!content) return null;
    const value = state === "done" && /^\s*[[{]/.test(content) ? parseJson(content) : undefined;
    if (value !== undefined) return this.tree(value);
    this.text.show(content);
    return this.text.element;
  }

  tree(value) {
    if (this.treeOf !== this.turn.content) this.treeBox = h("div", { class: "json-answer" }, jsonTree(value));
    this.treeOf = this.turn.content;
    return this.treeBox;
  }

  reasoning(isComing) {
    const { reasoning, content } = this.turn;
    if (!reasoning) return null;
    this.fold ??= h("details", { class: "reasoning" }, h("summary", {}), h("div", {}));
    const [summary, inside] = this.fold.children;
    summary.textContent = isComing && !content ? "Thinking…" : "Thoughts";
    inside.textContent = reasoning;
    return this.fold;
  }

  /** The calls; one that is waiting for its result keeps what was typed there. */
  callViews(isComing) {
    return this.turn.toolCalls.filter(Boolean).map((call) => {
      const isOpen = !isComing && this.turn.state === "done" && this.does.isOpen(call);
      const key = `${isOpen} ${call.id} ${call.function.name} ${call.function.arguments}`;
      const known = this.calls.get(call);
      if (known?.key === key) return known.view;
      const view = callView(call, isOpen ? this.does.answerCall : null);
      this.calls.set(call, { key, view });
      return view;
    });
  }

  fault() {
    const { error } = this.turn;
    if (!error) return null;
    const help = error.helps === "key" ? this.keyForm() : error.helps === "retry" ? this.retryButton(error.waitS) : null;
    return h("div", { class: "fault", role: "alert" }, h("strong", {}, error.title), h("p", {}, error.detail), help);
  }

  keyForm() {
    const id = `key-${this.turn.id}`;
    const input = h("input", { id, type: "password", ...UNWATCHED });
    const use = (event) => {
      event.preventDefault();
      if (input.value.trim()) this.does.useKey(this.turn, input.value.trim());
    };
    const button = h("button", { type: "submit", class: "button" }, "Use it and try again");
    return h("form", { class: "key-form", onsubmit: use }, h("label", { for: id }, "API key, kept until this page is closed"), input, button);
  }

  retryButton(waitS) {
    const button = h("button", { type: "button", class: "button", onclick: () => this.does.retry(this.turn) }, "Try again");
    const count = (left) => {
      button.disabled = left > 0;
      button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
      if (left > 0) setTimeout(count, 1000, left - 1);
    };
    if (waitS && waitS <= LONGEST_COUNT_S) count(Math.ceil(waitS));
    return button;
  }

  footParts() {
    const { turn, does } = this;
    const figures = turn.figures ? describeFigures(turn.figures) : [];
    const buttons = [
      turn.content && copyButton(() => turn.content),
      iconButton("edit", `Edit: ${speaker(turn)}`, () => this.edit()),
      turn.role !== "tool" && iconButton("retry", turn.role === "user" ? "Ask again" : "Answer again", () => does.retry(turn)),
      turn.exchange && iconButton("json", "Request and response as JSON", () => does.show(turn)),
    ];
    const shown = figures.length ? h("p", { class: "figures" }, ...figures.map((text) => h("span", {}, text))) : null;
    return [shown, h("div", { class: "turn-buttons" }, ...buttons.filter(Boolean))].filter(Boolean);
  }

  /** Puts the text into a box. A question that was changed is asked again; other turns only change. */
  edit() {
    const { turn, does } = this;
    const rows = Math.min(16, turn.content.split("\n").length + 1);
    const area = h("textarea", { "aria-label": `Edit: ${speaker(turn)}`, rows, ...UNWATCHED });
    area.value = turn.content;
    const back = () => {
      this.isEditing = false;
      this.update();
      this.foot.querySelector("[aria-label^=Edit]")?.focus();
    };
    const save = (event) => {
      event.preventDefault();
      this.isEditing = false;
      does.edit(turn, area.value);
    };
    this.isEditing = true;
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        back();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
    });
    const buttons = [
      h("button", { type: "submit", class: "button" }, turn.role === "assistant" ? "Save" : "Save and ask"),
      h("button", { type: "button", class: "button quiet", onclick: back }, "Cancel"),
    ];
    this.body.replaceChildren(h("form", { class: "edit", onsubmit: save }, area, h("div", { class: "edit-buttons" }, ...buttons)));
    this.foot.replaceChildren();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function waiting() {
  const words = h("span", { class: "visually-hidden" }, "Waiting for the first token");
  return h("p", { class: "waiting" }, words, h("i"), h("i"), h("i"));
}
