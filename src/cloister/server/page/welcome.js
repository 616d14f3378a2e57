// What an empty conversation shows: where one is, and a few questions to begin with.

import { byId, h } from "./dom.js";

// One of each thing that it can do. A test asks it all of them.
const OF_THE_EMBEDDED_MODEL = [
  "What can you do?",
  "What does the PostgreSQL command VACUUM do?",
  "whats the python json module for",
  "When does Python raise FileNotFoundError?",
  "What number is SQLITE_BUSY?",
  "Which type is the PostgreSQL setting backslash_quote?",
  "Count: apple, pear, plum",
  "Write JSON: name=Ann, age=31",
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
    ? "A small model that knows 2,400 short facts about Python, SQLite and PostgreSQL, and says so when it does not know. It can also count, pick, repeat, write JSON and call tools."
    : "What you write goes to this server and nowhere else.";
  byId("welcome").replaceChildren(
    h("h2", {}, "What would you like to know?"),
    h("p", { class: "soft" }, about),
    h("ul", {}, ...questions.map((text) => h("li", {}, h("button", { type: "button", class: "example", onclick: () => ask(text) }, text)))),
  );
}
