// The chat: asks, stops, edits, retries, and shows the conversation that is open. Answers of others go on meanwhile.

import { newFigures, takeChunk } from "./answer.js";
import { cutAfter, cutFrom, messagesOf, newTurn, openCalls } from "./conversation.js";
import { byId, setChildren } from "./dom.js";
import { explain } from "./errors.js";
import { showExchange } from "./exchange-view.js";
import { fieldsOf } from "./settings.js";
import { TurnView } from "./turn-view.js";

const NEAR_PX = 80;
const HIDDEN_DRAW_MS = 500;

export class ChatView {
  /**
   * @param page what the views share: memory, api, announcer, policy, toast(text, undo) and changed(), to call when conversations did.
   */
  constructor(page) {
    this.page = page;
    this.runs = new Map();
    this.views = new Map();
    this.does = {
      edit: (turn, text) => this.edit(turn, text),
      retry: (turn) => this.retry(turn),
      show: (turn) => showExchange(turn.exchange),
      answerCall: (call, text) => this.answerCall(call, text),
      useKey: (turn, key) => this.useKey(turn, key),
      isOpen: (call) => openCalls(this.conversation).includes(call),
    };
    this.scroller = byId("scroller");
    this.message = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("latest").addEventListener("click", () => this.toEnd());
    this.message.addEventListener("keydown", (event) => this.key(event));
    this.message.addEventListener("input", () => this.fit());
    this.scroller.addEventListener("scroll", () => this.showLatest(), { passive: true });
  }

  get conversation() {
    return this.page.memory.current;
  }

  get isRunning() {
    return this.runs.has(this.conversation.id);
  }

  /** Shows the open conversation anew. */
  show() {
    const { turns } = this.conversation;
    this.views = new Map(turns.map((turn) => [turn.id, this.viewOf(turn)]));
    setChildren(byId("turns"), [...this.views.values()].map((view) => view.element));
    byId("welcome").hidden = turns.length > 0;
    this.showRunning();
    this.toEnd();
  }

  /** The view of a turn, drawn as the turn is now. */
  viewOf(turn) {
    const known = this.views.get(turn.id);
    known?.update();
    return known ?? new TurnView(turn, this.does);
  }

  /** Asks what stands in the box. */
  send() {
    const text = this.message.value.trim();
    if (!text || this.isRunning) return;
    this.message.value = "";
    this.fit();
    this.conversation.turns.push(newTurn("user", { content: text }));
    this.ask();
  }

  /** Ends the answer that comes in. */
  stop() {
    this.runs.get(this.conversation.id)?.controller.abort();
  }

  retry(turn) {
    this.change(() => (turn.role === "assistant" ? cutFrom(this.conversation, turn) : cutAfter(this.conversation, turn)));
    this.ask();
  }

  edit(turn, text) {
    if (turn.role === "assistant") {
      turn.content = text;
      this.changed();
      return;
    }
    if (!text.trim()) return;
    this.change(() => {
      turn.content = text.trim();
      cutAfter(this.conversation, turn);
    }, turn);
    this.askUnlessOpen();
  }

  answerCall(call, text) {
    this.conversation.turns.push(newTurn("tool", { content: text, toolCallId: call.id }));
    this.askUnlessOpen();
  }

  async useKey(turn, key) {
    await this.page.useKey(key);
    this.retry(turn);
  }

  /** Asks for the next answer of the open conversation. */
  async ask() {
    const { page, conversation } = this;
    const request = this.request();
    const turn = newTurn("assistant", { state: "waiting", exchange: { request, response: [] }, figures: newFigures(performance.now()) });
    const run = { controller: new AbortController(), turn };
    conversation.turns.push(turn);
    this.runs.set(conversation.id, run);
    this.changed();
    page.announcer.begin();
    try {
      for await (const chunk of page.api.chat(request, run.controller.signal)) {
        takeChunk(turn, chunk, performance.now());
        turn.state = "streaming";
        this.drawSoon(run);
      }
      turn.state = "done";
    } catch (error) {
      turn.state = run.controller.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = explain(error);
    }
    if (this.runs.get(conversation.id) === run) this.runs.delete(conversation.id);
    this.ended(turn);
  }

  request() {
    const { page, conversation } = this;
    const { settings } = page.memory;
    const { streaming } = page.policy;
    const options = streaming ? { stream: true, stream_options: { include_usage: true } } : { stream: false };
    const fields = fieldsOf(settings);
    if (fields.tool_choice === "required" && conversation.turns.at(-1).role === "tool") fields.tool_choice = "auto"; // or it never ends
    const model = settings.model || page.model;
    return { ...(model && { model }), messages: messagesOf(conversation, settings.system), ...fields, ...options };
  }

  askUnlessOpen() {
    if (openCalls(this.conversation).length) this.changed();
    else this.ask();
  }

  /** Changes turns so that it can be undone when later ones went. */
  change(work, edited = null) {
    this.stop();
    const { conversation } = this;
    const before = [...conversation.turns];
    const content = edited?.content;
    work();
    const gone = before.length - conversation.turns.length;
    const undo = () => {
      this.runs.get(conversation.id)?.controller.abort();
      if (edited) edited.content = content;
      conversation.turns = before;
      this.changed();
    };
    if (gone > 1 || (edited && gone)) this.page.toast(`${gone} later ${gone === 1 ? "turn was" : "turns were"} replaced.`, undo);
  }

  changed() {
    this.page.changed();
    this.show();
    this.keepFocus();
  }

  /** Focus that was in something that is gone goes to the box. */
  keepFocus() {
    if (document.activeElement === document.body) this.focus();
  }

  /** Goes to the box, but not where that would open a keyboard over the page. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.message.focus();
  }

  ended(turn) {
    const view = this.views.get(turn.id);
    if (view) this.follow(() => view.update());
    this.showRunning();
    this.page.changed();
    const ending = { done: "", stopped: "Stopped.", failed: "" }[turn.state];
    if (view) this.page.announcer.end(turn.content, ending);
  }

  /** Draws an answer at most once per frame; a page that nobody sees has no frames. */
  drawSoon(run) {
    if (run.drawing) return;
    run.drawing = true;
    const draw = () => {
      run.drawing = false;
      const view = this.views.get(run.turn.id);
      if (!view || run.turn.state !== "streaming") return;
      this.follow(() => view.update());
      this.page.announcer.follow(run.turn.content);
    };
    if (document.hidden) setTimeout(draw, HIDDEN_DRAW_MS);
    else requestAnimationFrame(draw);
  }

  /** Draws, and stays at the end if it was there. */
  follow(draw) {
    const wasAtEnd = this.isAtEnd();
    draw();
    if (wasAtEnd) this.toEnd();
    else this.showLatest();
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.showLatest();
  }

  showLatest() {
    byId("latest").hidden = this.isAtEnd();
  }

  showRunning() {
    byId("stop").hidden = !this.isRunning;
    byId("send").hidden = this.isRunning;
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  /** Gives the box as many lines as its text has. */
  fit() {
    this.message.style.height = "auto";
    this.message.style.height = `${Math.min(this.message.scrollHeight, innerHeight * 0.4)}px`;
  }
}
