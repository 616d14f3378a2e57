// What a person said: the text as it was typed, folded where it is long, and the files that went with it.

import { h, icon } from "./dom.js";

const FOLD_LINES = 16;
const FOLD_CHARACTERS = 1500;

/** Returns a text in a paragraph; a long one shows its first lines and a button for the rest. */
export function saidText(text) {
  const words = h("p", { class: "said" }, text);
  const numLines = text.split("\n").length;
  if (numLines <= FOLD_LINES && text.length <= FOLD_CHARACTERS) return [words];
  const whole = numLines > FOLD_LINES ? `Show all ${numLines} lines` : `Show all ${text.length.toLocaleString("en")} characters`;
  const button = h("button", { type: "button", class: "text-button", "aria-expanded": "false" }, whole);
  const show = (isOpen) => {
    words.classList.toggle("folded", !isOpen);
    button.setAttribute("aria-expanded", String(isOpen));
    button.textContent = isOpen ? "Show less" : whole;
  };
  button.addEventListener("click", () => show(words.classList.contains("folded")));
  show(false);
  return [words, button];
}

/** Returns the box of a file: its name, which opens to its text; or the image that it is. */
export function fileBox({ name, text, image }) {
  if (image) return h("img", { class: "shown-image", src: image, alt: name });
  const numLines = text.replace(/\n$/, "").split("\n").length;
  const size = h("span", { class: "soft" }, `${numLines.toLocaleString("en")} ${numLines === 1 ? "line" : "lines"}`);
  const inside = h("pre", { tabindex: "0", role: "group", "aria-label": `File ${name}` }, text);
  return h("details", { class: "file" }, h("summary", {}, icon("file"), h("span", {}, name), size), inside);
}
