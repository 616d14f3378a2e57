// A form for structured output: the fields that an answer shall have. It writes the JSON schema.

import { UNWATCHED, h, iconButton } from "./dom.js";
import { selectBox } from "./field.js";
import { KINDS, fieldsOfSchema, schemaOfFields } from "./schema-fields.js";

/**
 * Returns the form.
 * @param text the schema to begin with; one that the form cannot show is left to its text.
 * @param write takes the schema whenever a field changes.
 */
export function schemaForm(text, write) {
  const fields = fieldsOfSchema(text);
  if (fields === null) return h("p", { class: "field hint" }, "This schema says more than the form can show; change its text.");
  const rows = h("ul", { class: "schema-rows" });
  const changed = () => write(schemaOfFields(fields));
  const draw = () => rows.replaceChildren(...fields.map(row));
  const row = (field, i) => {
    const number = i + 1;
    const name = h("input", { type: "text", placeholder: "Name", "aria-label": `Name of field ${number}`, ...UNWATCHED });
    name.value = field.name;
    name.addEventListener("input", () => {
      field.name = name.value;
      changed();
    });
    const kind = selectBox(KINDS, field.kind, `schema-kind-${number}`);
    kind.setAttribute("aria-label", `Kind of field ${number}`);
    kind.addEventListener("change", () => {
      field.kind = kind.value;
      draw();
      changed();
      rows.children[i].querySelector("select").focus();
    });
    const remove = iconButton("close", `Remove field ${number}`, () => {
      fields.splice(i, 1);
      draw();
      changed();
    });
    return h("li", {}, name, kind, remove, field.kind === "choice" && choicesInput(field, number, changed));
  };
  const add = () => {
    fields.push({ name: "", kind: "text", choices: [] });
    draw();
    rows.lastElementChild.querySelector("input").focus();
  };
  draw();
  const button = h("button", { type: "button", class: "text-button", onclick: add }, "Add a field");
  return h("div", { class: "field", role: "group", "aria-label": "Fields of the answer" }, h("p", { class: "label" }, "Fields of the answer"), rows, button);
}

function choicesInput(field, number, changed) {
  const input = h("input", { type: "text", class: "choices-input", placeholder: "red, green, blue", "aria-label": `Choices of field ${number}`, ...UNWATCHED });
  input.value = field.choices.join(", ");
  input.addEventListener("input", () => {
    field.choices = input.value.split(",").map((choice) => choice.trim()).filter(Boolean);
    changed();
  });
  return input;
}
