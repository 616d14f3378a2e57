// The chat: asks, stops, edits, retries, and shows the conversation that is open. Answers of others go on meanwhile.

import { newFigures, takeChunk } from "./answer.js";
import { showLikelihoods } from "./likelihood-view.js";
import { Composer } from "./composer.js";
import { choose, cutAfter, cutFrom, messagesOf, newTurn, openCalls } from "./conversation.js";
import { byId, setChildren } from "./dom.js";
import { explain } from "./errors.js";
import { showExchange } from "./exchange-view.js";
import { Scroller } from "./scroller.js";
import { fieldsOf } from "./settings.js";
import { TurnView } from "./turn-view.js";
import { askVariant } from "./variant-dialog.js";

const HIDDEN_DRAW_MS = 500;

export class ChatView {
  /**
   * @param page what the views share: memory, api, announcer, policy, served, toast(text, undo) and changed(), to call when conversations did.
   */
  constructor(page) {
    this.page = page;
    this.runs = new Map();
    this.views = new Map();
    this.does = {
      edit: (turn, text) => this.edit(turn, text),
      retry: (turn) => this.retry(turn),
      resume: (turn) => this.resume(turn),
      vary: (turn) => askVariant(page, (settings, label) => this.vary(turn, settings, label)),
      choose: (turn, variant) => this.choose(turn, variant),
      show: (turn) => showExchange(turn.exchange),
      showLikelihoods: (turn) => showLikelihoods(turn.exchange),
      answerCall: (call, text) => this.answerCall(call, text),
      useKey: (turn, key) => this.useKey(turn, key),
      isOpen: (call) => openCalls(this.conversation).includes(call),
      isLast: (turn) => this.conversation.turns.at(-1) === turn,
    };
    this.scroller = new Scroller(byId("scroller"), byId("latest"));
    this.composer = new Composer(page, (text, files) => this.send(text, files));
    byId("stop").addEventListener("click", () => this.stop());
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
    this.composer.showRunning(this.isRunning);
    this.scroller.toEnd();
  }

  /** The view of a turn, drawn as the turn is now. */
  viewOf(turn) {
    const known = this.views.get(turn.id);
    if (known?.turn !== turn) return new TurnView(turn, this.does);
    known.update();
    return known;
  }

  /** The view that shows a turn, itself or beside another one. */
  viewWith(turn) {
    return [...this.views.values()].find((view) => view.turn === turn || view.turn.variants.includes(turn));
  }

  /** Asks a question; returns whether it could be asked. */
  send(text, files = []) {
    if (this.isRunning) return false;
    this.conversation.turns.push(newTurn("user", { content: text, files }));
    this.ask();
    return true;
  }

  /** Ends the answer that comes in. */
  stop() {
    this.runs.get(this.conversation.id)?.controller.abort();
  }

  retry(turn) {
    if (!this.conversation.turns.includes(turn)) return this.retryVariant(turn);
    this.change(() => (turn.role === "assistant" ? cutFrom(this.conversation, turn) : cutAfter(this.conversation, turn)));
    this.ask();
  }

  edit(turn, text) {
    if (turn.role === "assistant") {
      turn.content = text;
      this.changed();
      return;
    }
    if (!text.trim() && !turn.files.length) return;
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
  ask() {
    const { turns } = this.conversation;
    const request = this.request(turns);
    const turn = newTurn("assistant");
    turns.push(turn);
    return this.answer(turn, request);
  }

  /** Goes on with an answer that was cut: the server takes it as the beginning of what it is to say. */
  resume(turn) {
    const request = this.request(this.conversation.turns);
    if (turn.reasoning) request.messages.at(-1).reasoning_content = turn.reasoning; // it goes on from what it thought
    return this.answer(turn, { ...request, continue_final_message: true, add_generation_prompt: false }, true);
  }

  /** Asks for another answer, which stands beside the one there is. */
  vary(turn, settings, label) {
    this.stop();
    const { turns } = this.conversation;
    const variant = newTurn("assistant", { label });
    turn.variants.push(variant);
    return this.answer(variant, this.request(turns.slice(0, turns.indexOf(turn)), settings));
  }

  choose(turn, chosen) {
    this.stop();
    const undo = choose(this.conversation, turn, chosen);
    this.changed();
    this.page.toast("The other answers were dropped.", () => {
      undo();
      this.changed();
    });
  }

  retryVariant(variant) {
    const turn = this.viewWith(variant).turn;
    const { turns } = this.conversation;
    Object.assign(variant, { content: "", reasoning: "", toolCalls: [] });
    return this.answer(variant, variant.exchange?.request ?? this.request(turns.slice(0, turns.indexOf(turn))));
  }

  /** Sends a request and puts what comes back into a turn. */
  async answer(turn, request, continues = false) {
    const { page, conversation } = this;
    const figures = newFigures(performance.now(), continues);
    Object.assign(turn, { state: "waiting", error: null, exchange: { request, response: [] }, figures });
    const run = { controller: new AbortController(), turn };
    this.runs.set(conversation.id, run);
    this.changed();
    page.announcer.begin(turn.content.length);
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

  request(turns, settings = this.page.memory.settings) {
    const { streaming } = this.page.policy;
    const options = streaming ? { stream: true, stream_options: { include_usage: true } } : { stream: false };
    const fields = fieldsOf(settings);
    if (fields.tool_choice === "required" && turns.at(-1)?.role === "tool") fields.tool_choice = "auto"; // or it never ends
    const model = this.page.modelOf(settings);
    return { ...(model && { model }), messages: messagesOf(turns, settings.system), ...fields, ...options };
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
    if (document.activeElement === document.body) this.focus(); // it was in something that is gone
  }

  /** Goes to the box, but not where that would open a keyboard over the page. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.composer.focus();
  }

  ended(turn) {
    const view = this.viewWith(turn);
    if (view) this.scroller.follow(() => view.update());
    this.composer.showRunning(this.isRunning);
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
      const view = this.viewWith(run.turn);
      if (!view || run.turn.state !== "streaming") return;
      this.scroller.follow(() => view.update());
      this.page.announcer.follow(run.turn.content);
    };
    if (document.hidden) setTimeout(draw, HIDDEN_DRAW_MS);
    else requestAnimationFrame(draw);
  }
}
