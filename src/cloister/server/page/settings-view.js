// The dialog of settings. What is typed holds at once; what is wrong is said beside its field and not sent.

import { UNWATCHED, byId, h, iconButton } from "./dom.js";
import { faultOf } from "./settings.js";

const SECTIONS = [
  [
    "Answers",
    [
      { name: "model", label: "Model", kind: "select" },
      { name: "system", label: "System prompt", kind: "area", rows: 3, hint: "Said to the model before every conversation." },
      { name: "temperature", label: "Temperature", kind: "number", hint: "0 always takes the most likely token; up to 2." },
      { name: "top_p", label: "Top p", kind: "number", hint: "From 0 to 1: only the likeliest tokens that make up this share." },
      { name: "max_tokens", label: "Longest answer", kind: "number", hint: "In tokens." },
      { name: "seed", label: "Seed", kind: "number", hint: "The same seed gives the same answer." },
      { name: "stop", label: "Stop at", kind: "area", rows: 2, hint: "One text per line; the answer ends before it." },
      { name: "format", label: "Form of the answer", kind: "select", options: { text: "Text", json_object: "JSON", json_schema: "JSON by a schema" } },
      { name: "schema", label: "JSON schema", kind: "area", rows: 4, code: true, when: ({ format }) => format === "json_schema" },
      { name: "more", label: "More fields", kind: "area", rows: 2, code: true, hint: "A JSON object that goes into every request, such as {\"top_k\": 20}." },
    ],
  ],
  [
    "Tools",
    [
      { name: "tools", label: "Tool definitions", kind: "area", rows: 5, code: true, hint: "JSON, as the OpenAI API takes it: a list, or one function. You answer calls by hand." },
      { name: "tool_choice", label: "The model", kind: "select", options: { auto: "may call a tool", required: "must call a tool", none: "must not call a tool" }, when: ({ tools }) => tools.trim() !== "" },
    ],
  ],
];
const THEMES = { system: "As this device has it", light: "Light", dark: "Dark" };

export class SettingsView {
  /** @param page what the views share: memory, api, models, useKey, set(name, value) and forgetAll(). */
  constructor(page) {
    this.page = page;
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
  }

  open() {
    this.fields = [];
    const sections = SECTIONS.map(([title, fields]) => h("fieldset", {}, h("legend", {}, title), ...fields.map((field) => this.field(field))));
    this.dialog.replaceChildren(
      h("header", {}, h("h2", { id: "settings-title" }, "Settings"), iconButton("close", "Close", () => this.dialog.close())),
      h("div", { class: "panel-body" }, ...sections, this.access(), this.device()),
    );
    this.showConditional();
    this.dialog.showModal();
  }

  field(field) {
    const { name, label, hint } = field;
    const id = `set-${name}`;
    const fault = h("p", { class: "field-fault", id: `${id}-fault`, role: "alert" });
    const input = this.input(field, id);
    input.setAttribute("aria-describedby", `${id}-hint ${id}-fault`);
    const check = () => {
      fault.textContent = faultOf(name, input.value);
      input.setAttribute("aria-invalid", String(fault.textContent !== ""));
    };
    const take = () => {
      this.page.set(name, input.value);
      check();
      this.showConditional();
    };
    input.addEventListener(field.kind === "select" ? "change" : "input", take);
    check();
    const note = h("p", { class: "hint", id: `${id}-hint` }, hint ?? "");
    const box = h("div", { class: `field ${field.kind}` }, h("label", { for: id }, label), input, note, fault);
    this.fields.push([field, box]);
    return box;
  }

  input({ name, kind, rows, code, options }, id) {
    const value = this.page.memory.settings[name];
    if (kind === "select") return this.select(name === "model" ? this.models() : options, value, id);
    const attributes = { id, placeholder: kind === "number" ? "as the model has it" : "", ...UNWATCHED };
    const area = kind === "area";
    const input = area
      ? h("textarea", { ...attributes, rows, class: code && "code" })
      : h("input", { ...attributes, type: "text", inputmode: "decimal" });
    input.value = value;
    return input;
  }

  select(options, value, id) {
    const items = Object.entries(options).map(([key, label]) => h("option", { value: key, selected: key === value }, label));
    return h("select", { id }, ...items);
  }

  models() {
    const { models, model } = this.page;
    const others = models.filter((name) => name !== model);
    return { "": model || "the one that is served", ...Object.fromEntries(others.map((name) => [name, name])) };
  }

  showConditional() {
    for (const [{ when }, box] of this.fields) box.hidden = when ? !when(this.page.memory.settings) : false;
  }

  access() {
    const input = h("input", { id: "set-key", type: "password", ...UNWATCHED });
    input.value = this.page.api.key;
    input.addEventListener("change", () => this.page.useKey(input.value.trim()));
    const needed = this.page.policy.api_key ? "This server asks for one." : "This server asks for none.";
    const hint = h("p", { class: "hint" }, `${needed} It is never written down: closing this page forgets it.`);
    const form = h("form", { class: "field", onsubmit: (event) => event.preventDefault() }, h("label", { for: "set-key" }, "API key"), input, hint);
    return h("fieldset", {}, h("legend", {}, "Access"), form);
  }

  device() {
    const { page } = this;
    const theme = this.select(THEMES, page.memory.settings.theme, "set-theme");
    theme.addEventListener("change", () => page.set("theme", theme.value));
    const keep = h("input", { id: "set-keep", type: "checkbox", checked: page.memory.settings.keep, "aria-describedby": "set-keep-hint" });
    keep.addEventListener("change", () => page.set("keep", keep.checked));
    const keepHint = "Conversations and settings are written, readable, into this browser's storage. Switching it off takes them away.";
    const forget = () => {
      page.forgetAll();
      this.dialog.close();
    };
    return h(
      "fieldset",
      {},
      h("legend", {}, "This device"),
      h("div", { class: "field select" }, h("label", { for: "set-theme" }, "Colours"), theme),
      h("div", { class: "field check" }, keep, h("label", { for: "set-keep" }, "Keep on this device"), h("p", { class: "hint", id: "set-keep-hint" }, keepHint)),
      h("button", { type: "button", class: "button quiet", onclick: forget }, "Forget all conversations"),
    );
  }
}
