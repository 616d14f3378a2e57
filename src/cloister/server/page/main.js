// Puts the page together.

import { Announcer } from "./announce.js";
import { Api, ApiError } from "./api.js";
import { BoardView } from "./board-view.js";
import { ChatView } from "./chat-view.js";
import { showDialog } from "./dialog.js";
import { byId, h } from "./dom.js";
import { explain } from "./errors.js";
import { ListView } from "./list-view.js";
import { Memory } from "./memory.js";
import { ModelSwitch } from "./model-switch.js";
import { PrivacyLine } from "./privacy-line.js";
import { SettingsView } from "./settings-view.js";
import { Shortcuts } from "./shortcuts.js";
import { showWelcome } from "./welcome.js";

const TOAST_MS = 8000;

/** What the views share. */
class Page {
  constructor() {
    this.memory = new Memory(storage());
    this.api = new Api();
    this.announcer = new Announcer(byId("spoken"));
    this.policy = {
      profile: "", summary: "", api_key: false, streaming: true, keeping: false, metrics: "all", metrics_history: false, tenants: false,
    };
    this.model = "";
    this.models = [];
    this.privacy = new PrivacyLine(this);
    this.switch = new ModelSwitch(this);
    this.list = new ListView(this);
    this.chat = new ChatView(this);
    this.board = new BoardView(this);
    this.settings = new SettingsView(this);
    this.shortcuts = new Shortcuts([
      ["Escape", "Stop the answer", () => this.escape()],
      ["/", "Go to the message box", () => this.chat.composer.focus()],
      ["Alt N", "New conversation", () => this.begin()],
      ["Alt ArrowUp", "Conversation above", () => this.step(-1)],
      ["Alt ArrowDown", "Conversation below", () => this.step(1)],
      ["Alt C", "Chat", () => (location.hash = "#chat")],
      ["Alt B", "Board", () => (location.hash = "#board")],
      ["Alt S", "Settings", () => this.settings.open()],
      ["Alt T", "Dark or light", () => this.switchTheme()],
      ["?", "These shortcuts", () => this.shortcuts.open()],
    ]);
  }

  async start() {
    this.showTheme();
    this.list.show();
    this.chat.show();
    addEventListener("hashchange", () => {
      this.showView();
      this.focusView();
    });
    byId("switch-theme").addEventListener("click", () => this.switchTheme());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      location.hash = "#chat";
      this.chat.composer.focus();
    });
    await this.learnPolicy();
    await this.learnModels();
    this.showView();
    document.documentElement.dataset.ready = "";
  }

  async learnPolicy() {
    try {
      this.policy = await this.api.json("/v1/policy");
      this.memory.learnPolicy(this.policy);
      this.privacy.say(this.policy);
      this.showTheme();
      this.list.show();
      this.chat.show();
    } catch (error) {
      this.privacy.fail(explain(error).title);
    }
  }

  async learnModels() {
    try {
      if (this.lacksKey) throw new ApiError(401);
      this.models = (await this.api.json("/v1/models")).data.map(({ id }) => id);
      this.model = this.models[0] ?? "";
      this.switch.show();
    } catch (error) {
      this.switch.say(error.status === 401 ? "asks for an API key" : "");
    }
    showWelcome(this.model, (text) => this.chat.send(text));
  }

  /** The model that answers: the one that was chosen, if this server has it. */
  get served() {
    return this.modelOf(this.memory.settings);
  }

  /** The model that settings ask for: the first one, unless they choose another that this server has. */
  modelOf({ model }) {
    return this.models.includes(model) ? model : this.model;
  }

  /** Whether there is no use in asking the API for anything yet. */
  get lacksKey() {
    return this.policy.api_key && !this.api.key;
  }

  /** Takes an API key for as long as the page is open. */
  useKey(key) {
    this.api.key = key;
    return this.learnModels();
  }

  set(name, value) {
    this.memory.set(name, value);
    if (name === "theme") this.showTheme();
    if (name === "keep") this.list.show();
    if (name === "model") this.switch.show();
  }

  begin() {
    this.memory.begin();
    this.open(this.memory.current);
  }

  open(conversation) {
    this.memory.current = conversation;
    location.hash = "#chat";
    this.list.toggle(false);
    this.changed();
    this.chat.show();
    this.chat.focus();
  }

  step(by) {
    const { shown } = this.list;
    const next = shown[shown.indexOf(this.memory.current) + by];
    if (next) this.open(next);
  }

  forgetAll() {
    for (const { controller } of this.chat.runs.values()) controller.abort();
    this.memory.forgetAll();
    this.toast();
    this.open(this.memory.current);
  }

  changed() {
    this.memory.write();
    this.list.show();
  }

  escape() {
    if (document.body.classList.contains("list-open")) this.list.toggle(false);
    else this.chat.stop();
  }

  showView() {
    const isBoard = location.hash === "#board";
    byId("chat-view").hidden = isBoard;
    byId("board-view").hidden = !isBoard;
    document.body.classList.toggle("on-board", isBoard);
    for (const [id, isHere] of [["go-chat", !isBoard], ["go-board", isBoard]]) byId(id).setAttribute("aria-current", isHere ? "page" : "false");
    this.board.open(isBoard);
  }

  /** A user who changes the view goes on in it. */
  focusView() {
    if (location.hash === "#board") byId("board-view").focus();
    else this.chat.focus();
  }

  showTheme() {
    const { theme } = this.memory.settings;
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  switchTheme() {
    const { theme } = document.documentElement.dataset;
    const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.set("theme", isDark ? "light" : "dark");
  }

  /** Says something for a while, with a way back if there is one. Without a text, takes it away. */
  toast(text, undo) {
    const toast = byId("toast");
    clearTimeout(this.toastTimer);
    const close = () => toast.replaceChildren();
    close();
    if (!text) return;
    const back = () => {
      close();
      undo();
    };
    const button = h("button", { type: "button", class: "text-button", onclick: back }, "Undo");
    toast.append(h("span", {}, text), ...(undo ? [button] : []));
    this.toastTimer = setTimeout(close, TOAST_MS);
  }

  /** Lets the user choose one of a few things: pairs of words and what to do. */
  choose(title, choices) {
    const button = ([label, work]) => {
      const take = () => {
        close();
        work();
      };
      return h("button", { type: "button", class: "button", onclick: take }, label);
    };
    const close = showDialog(title, h("div", { class: "panel-body choices" }, ...choices.map(button)));
  }
}

/** The browser's storage, or null where it is not allowed. */
function storage() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

new Page().start();
