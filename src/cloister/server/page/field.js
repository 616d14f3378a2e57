// One labelled field of a form, with its hint and what is wrong with it.

import { UNWATCHED, h } from "./dom.js";
import { faultOf } from "./settings.js";

const DEFAULT = "Model default";

/** The fields that shape an answer; more than one form has them. */
export const SAMPLING = [
  { name: "temperature", label: "Temperature", kind: "number", hint: "0 always takes the most likely token; up to 2." },
  { name: "top_p", label: "Top p", kind: "number", hint: "From 0 to 1: only the likeliest tokens that make up this share." },
  { name: "max_tokens", label: "Longest answer", kind: "number", hint: "In tokens." },
  { name: "seed", label: "Seed", kind: "number", hint: "The same seed gives the same answer." },
];

/**
 * Returns the box of a field.
 * @param take is given each value: a text, or a truth of a check.
 * @param form what the ids of the fields of a form begin with.
 */
export function fieldBox(field, value, take, form = "set") {
  const { name, label, kind, hint = "" } = field;
  const id = `${form}-${name}`;
  const fault = h("p", { class: "field-fault", id: `${id}-fault`, role: "alert" });
  const input = inputOf(field, value, id);
  input.setAttribute("aria-describedby", `${id}-hint ${id}-fault`);
  const check = () => {
    fault.textContent = faultOf(name, input.value);
    input.setAttribute("aria-invalid", String(fault.textContent !== ""));
  };
  const isCheck = kind === "check";
  const change = () => {
    take(isCheck ? input.checked : input.value);
    if (!isCheck) check();
  };
  input.addEventListener(kind === "select" || isCheck ? "change" : "input", change);
  if (!isCheck) check();
  const parts = [h("label", { for: id }, label), input];
  const note = h("p", { class: "hint", id: `${id}-hint` }, hint);
  return h("div", { class: `field ${kind}` }, ...(isCheck ? parts.reverse() : parts), note, fault);
}

/** Returns a list to choose from. */
export function selectBox(options, value, id) {
  const items = Object.entries(options).map(([key, label]) => h("option", { value: key, selected: key === value }, label));
  return h("select", { id }, ...items);
}

function inputOf({ kind, rows, code, options, disabled }, value, id) {
  if (kind === "select") return selectBox(options, value, id);
  if (kind === "check") return h("input", { id, type: "checkbox", checked: value, disabled });
  const attributes = { id, placeholder: kind === "number" ? DEFAULT : "", ...UNWATCHED };
  const isArea = kind === "area";
  const input = isArea
    ? h("textarea", { ...attributes, rows, class: code && "code" })
    : h("input", { ...attributes, type: "text", inputmode: kind === "number" ? "decimal" : "text" });
  input.value = value;
  return input;
}
