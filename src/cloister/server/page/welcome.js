// What an empty conversation shows: where one is, and a few questions to begin with.

import { byId, h } from "./dom.js";

const OF_THE_EMBEDDED_MODEL = [
  "What does the PostgreSQL command VACUUM do?",
  "What is the Python module json?",
  "What does the SQLite pragma foreign_keys do?",
  "What does the Python function sorted do?",
];
const OF_ANY_MODEL = [
  "Explain a hash table to somebody who cooks.",
  "Write a Python function that merges two sorted lists.",
  "What are three good questions to ask before renting a flat?",
];

/** Draws it. `ask` takes a question. */
export function showWelcome(model, ask) {
  const isEmbedded = model.startsWith("cloister-");
  const questions = isEmbedded ? OF_THE_EMBEDDED_MODEL : OF_ANY_MODEL;
  const about = isEmbedded
    ? "A small model that knows some facts of the documentation of SQLite, Python and PostgreSQL."
    : "What you write goes to this server and nowhere else.";
  byId("welcome").replaceChildren(
    h("h2", {}, "What would you like to know?"),
    h("p", { class: "soft" }, about),
    h("ul", {}, ...questions.map((text) => h("li", {}, h("button", { type: "button", class: "example", onclick: () => ask(text) }, text)))),
  );
}
