// One turn on the screen: text, reasoning, tool calls, what went wrong, figures, and what can be done with it.

import { describeFigures } from "./answer.js";
import { callView } from "./call-view.js";
import { speaker } from "./conversation.js";
import { h, iconButton, setChildren } from "./dom.js";
import { jsonTree } from "./json-tree.js";
import { likelihoodsOf } from "./likelihoods.js";
import { menuButton } from "./menu.js";
import { MarkdownView, copyButton } from "./render.js";
import { fileBox, saidText } from "./said.js";
import { parseJson } from "./settings.js";
import { editForm } from "./turn-edit.js";
import { faultBox } from "./turn-fault.js";

/**
 * Shows a turn, and the answers that stand beside it, and shows them again when `update` is called.
 *
 * `does` are the actions of the chat: edit(turn, text), retry(turn), resume(turn), vary(turn), choose(turn, variant), show(turn),
 * showLikelihoods(turn), answerCall(call, text), useKey(turn, key), isOpen(call), isLast(turn).
 */
export class TurnView {
  /** @param beside the turn that this one is a variant of, or null. */
  constructor(turn, does, beside = null) {
    this.turn = turn;
    this.does = does;
    this.beside = beside;
    this.text = new MarkdownView();
    this.calls = new Map();
    this.variants = new Map();
    this.isEditing = false;
    this.head = h("div", { class: "turn-head" });
    this.body = h("div", { class: "turn-body" });
    this.foot = h("div", { class: "turn-foot" });
    this.article = h("article", { class: `turn ${turn.role}`, "aria-label": speaker(turn) }, this.head, this.body, this.foot);
    this.element = h("li", {}, this.article);
    this.update();
  }

  /** Draws the turn as it is now; what did not change keeps its nodes. */
  update() {
    const { turn } = this;
    this.updateVariants();
    if (this.isEditing) return;
    const isComing = turn.state === "waiting" || turn.state === "streaming";
    this.article.toggleAttribute("data-coming", isComing);
    this.article.setAttribute("aria-busy", String(isComing));
    setChildren(this.head, this.headParts());
    setChildren(this.body, this.parts(isComing));
    setChildren(this.foot, isComing ? [] : this.footParts());
  }

  updateVariants() {
    const views = this.turn.variants.map((variant) => {
      const view = this.variants.get(variant) ?? new TurnView(variant, this.does, this.turn);
      this.variants.set(variant, view);
      view.update();
      return view.article;
    });
    this.element.classList.toggle("compared", views.length > 0);
    setChildren(this.element, [this.article, ...views]);
  }

  /** What a compared answer was asked with, and the button that takes it. */
  headParts() {
    const { turn, does, beside } = this;
    const first = beside ?? turn;
    if (!first.variants.length) return [];
    const label = beside ? turn.label : "In the conversation";
    const take = h("button", { type: "button", class: "text-button", onclick: () => does.choose(first, turn) }, "Use this one");
    return [h("span", {}, label), take];
  }

  parts(isComing) {
    const { turn } = this;
    if (turn.role === "tool") return [h("p", { class: "caption" }, speaker(turn)), ...this.said()];
    if (turn.role === "user") return this.said();
    const parts = [this.reasoning(isComing), this.answer(), ...this.callViews(isComing)];
    if (turn.error) parts.push(faultBox(turn, this.does));
    if (turn.state === "waiting") parts.push(waiting());
    else if (!isComing) parts.push(this.ending());
    return parts.filter(Boolean);
  }

  said() {
    const { content, files } = this.turn;
    if (this.saidOf !== content) this.saidParts = [...(content ? saidText(content) : []), ...files.map(fileBox)];
    this.saidOf = content;
    return this.saidParts;
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
      const key = `${isComing} ${isOpen} ${call.id} ${call.function.name} ${call.function.arguments}`;
      const known = this.calls.get(call);
      if (known?.key === key) return known.view;
      const view = callView(call, isComing, isOpen ? this.does.answerCall : null);
      this.calls.set(call, { key, view });
      return view;
    });
  }

  /** How an answer ended that did not simply end, and the button that goes on with one that was cut. */
  ending() {
    const { state, content, toolCalls, figures } = this.turn;
    const isCut = state === "done" && figures?.finish === "length";
    const isEmpty = state === "done" && !content && !toolCalls.length;
    const words = state === "stopped" ? "Stopped." : isCut ? "Stopped at the length limit." : isEmpty ? "The model said nothing." : "";
    const canResume = (isCut || state === "stopped" || state === "failed") && this.canResume();
    if (!words && !canResume) return null;
    const resume = h("button", { type: "button", class: "button quiet", onclick: () => this.does.resume(this.turn) }, "Continue");
    return h("p", { class: "ending" }, words, canResume && resume);
  }

  /** A server goes on with text alone, at the end of the conversation, and not inside a form. */
  canResume() {
    const { content, toolCalls, variants, exchange } = this.turn;
    const isText = content.trim() && !toolCalls.length && !exchange?.request.response_format;
    return isText && !this.beside && !variants.length && this.does.isLast(this.turn);
  }

  footParts() {
    const { turn, does, beside } = this;
    const figures = turn.figures ? describeFigures(turn.figures) : [];
    const buttons = [
      turn.content && copyButton(() => turn.content),
      iconButton("edit", `Edit: ${speaker(turn)}`, () => this.edit()),
      turn.role !== "tool" && !beside && iconButton("retry", turn.role === "user" ? "Ask again" : "Answer again", () => does.retry(turn)),
      ...(turn.role === "assistant" && (turn.exchange || !beside) ? menuButton("More", () => this.actions()) : []),
    ];
    const shown = figures.map(([text, title]) => h("span", { title }, text));
    return [shown.length ? h("p", { class: "figures" }, ...shown) : null, h("div", { class: "turn-buttons" }, ...buttons.filter(Boolean))].filter(Boolean);
  }

  /** What can be done with an answer beyond the plain things. */
  actions() {
    const { turn, does, beside } = this;
    return [
      !beside && ["compare", "Answer with other settings", () => does.vary(turn)],
      likelihoodsOf(turn.exchange).length > 0 && ["chances", "What else it could have said", () => does.showLikelihoods(turn)],
      turn.exchange && ["json", "Request and response as JSON", () => does.show(turn)],
    ].filter(Boolean);
  }

  /** Puts the text into a box. A question that was changed is asked again; other turns only change. */
  edit() {
    const { turn, does } = this;
    const action = turn.role === "assistant" ? "Save" : "Save and ask";
    const save = (text) => {
      this.isEditing = false;
      does.edit(turn, text);
    };
    const cancel = () => {
      this.isEditing = false;
      this.update();
      this.foot.querySelector("[aria-label^=Edit]")?.focus();
    };
    const { form, area } = editForm({ label: `Edit: ${speaker(turn)}`, text: turn.content, action }, save, cancel);
    this.isEditing = true;
    this.body.replaceChildren(form);
    this.foot.replaceChildren();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function waiting() {
  const words = h("span", { class: "visually-hidden" }, "Waiting for the first token");
  return h("p", { class: "waiting" }, words, h("i"), h("i"), h("i"));
}
