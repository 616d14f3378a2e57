// The dialog of settings. What is typed holds at once; what is wrong is said beside its field and not sent.

import { UNWATCHED, byId, h, iconButton } from "./dom.js";
import { SAMPLING, fieldBox, selectBox } from "./field.js";
import { presetBar } from "./preset-bar.js";
import { schemaForm } from "./schema-form.js";

const FORMS = { text: "Text", json_object: "JSON", json_schema: "JSON by a schema" };
const CHOICES = { auto: "may call a tool", required: "must call a tool", none: "must not call a tool" };
const THEMES = { system: "Same as this device", light: "Light", dark: "Dark" };
const isBySchema = ({ format }) => format === "json_schema";
const ANSWERS = [
  { name: "model", label: "Model", kind: "select" },
  { name: "system", label: "System prompt", kind: "area", rows: 3, hint: "Said to the model before every conversation." },
  ...SAMPLING,
  { name: "stop", label: "Stop at", kind: "area", rows: 2, hint: "One text per line; the answer ends before it." },
  { name: "format", label: "Form of the answer", kind: "select", options: FORMS },
  { name: "fields", kind: "schema", when: isBySchema },
  { name: "schema", label: "JSON schema", kind: "area", rows: 4, code: true, when: isBySchema },
  { name: "likelihoods", label: "Likelihoods", kind: "check", hint: "Each answer also brings what else the model could have said; see its menu." },
  { name: "more", label: "More fields", kind: "area", rows: 2, code: true, hint: "A JSON object that goes into every request, such as {\"top_k\": 20}." },
];
const TOOLS = [
  { name: "tools", label: "Tool definitions", kind: "area", rows: 5, code: true, hint: "JSON, as the OpenAI API takes it: a list, or one function. You answer calls by hand." },
  { name: "tool_choice", label: "The model", kind: "select", options: CHOICES, when: ({ tools }) => tools.trim() !== "" },
];

export class SettingsView {
  /** @param page what the views share: memory, api, models, useKey, set(name, value) and forgetAll(). */
  constructor(page) {
    this.page = page;
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
  }

  open() {
    this.draw();
    if (!this.dialog.open) this.dialog.showModal();
  }

  draw() {
    this.fields = [];
    const section = (title, first, fields) => h("fieldset", {}, h("legend", {}, title), first, ...fields.map((field) => this.field(field)));
    const presets = presetBar(this.page, () => this.open());
    this.dialog.replaceChildren(
      h("header", {}, h("h2", { id: "settings-title" }, "Settings"), iconButton("close", "Close", () => this.dialog.close())),
      h("div", { class: "panel-body" }, section("Answers", presets, ANSWERS), section("Tools", null, TOOLS), this.access(), this.device()),
    );
    this.showConditional();
  }

  field(field) {
    const { name } = field;
    const { settings } = this.page.memory;
    const take = (value) => {
      this.page.set(name, value);
      this.showConditional();
    };
    const options = name === "model" ? this.models() : field.options;
    const box = field.kind === "schema" ? this.schema() : fieldBox({ ...field, options }, settings[name], take);
    this.fields.push([field, box]);
    return box;
  }

  /** The form that writes the JSON schema below it. */
  schema() {
    return schemaForm(this.page.memory.settings.schema, (text) => {
      const area = byId("set-schema");
      area.value = text;
      area.dispatchEvent(new Event("input"));
    });
  }

  models() {
    const { models, model } = this.page;
    const others = models.filter((name) => name !== model);
    return { "": model || "The one that is served", ...Object.fromEntries(others.map((name) => [name, name])) };
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
    const { mayKeep, settings } = page.memory;
    const theme = selectBox(THEMES, settings.theme, "set-theme");
    theme.addEventListener("change", () => page.set("theme", theme.value));
    const allowed = "Conversations, presets and settings are written, readable, into this browser's storage. Switching it off takes them away.";
    const refused = "The privacy profile does not allow it: nothing is written, and nothing that was kept before is read.";
    const keep = { name: "keep", label: "Keep on this device", kind: "check", hint: mayKeep ? allowed : refused, disabled: !mayKeep };
    const forget = () => {
      page.forgetAll();
      this.dialog.close();
    };
    return h(
      "fieldset",
      {},
      h("legend", {}, "This device"),
      h("div", { class: "field select" }, h("label", { for: "set-theme" }, "Colours"), theme),
      fieldBox(keep, settings.keep, (value) => page.set("keep", value)),
      h("button", { type: "button", class: "button quiet", onclick: forget }, "Forget all conversations"),
    );
  }
}
