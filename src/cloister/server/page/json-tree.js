// JSON as a tree that opens and closes.

import { h } from "./dom.js";

const OPEN_DEPTH = 2;

/** Returns a tree for a value that JSON can hold. */
export function jsonTree(value) {
  return h("div", { class: "json-tree" }, branch(null, value, 0));
}

function branch(key, value, depth) {
  const name = key === null ? [] : [h("span", { class: "json-key" }, key), ": "];
  if (typeof value !== "object" || value === null) return h("div", { class: "json-leaf" }, ...name, leaf(value));
  const isList = Array.isArray(value);
  const entries = Object.entries(value);
  const brackets = isList ? "[]" : "{}";
  if (!entries.length) return h("div", { class: "json-leaf" }, ...name, brackets);
  const count = `${brackets[0]} ${entries.length} ${brackets[1]}`;
  const children = entries.map(([inner, part]) => branch(inner, part, depth + 1));
  const summary = h("summary", {}, ...name, h("span", { class: "json-count" }, count));
  return h("details", { open: depth < OPEN_DEPTH }, summary, h("div", { class: "json-children" }, ...children));
}

function leaf(value) {
  const kind = value === null ? "keyword" : { string: "string", number: "number", boolean: "keyword" }[typeof value];
  return h("span", { class: `code-${kind}` }, JSON.stringify(value));
}
