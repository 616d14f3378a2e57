// What went wrong with an answer, and what helps.

import { UNWATCHED, h } from "./dom.js";

const LONGEST_COUNT_S = 300;

/** Returns the box that explains a turn's error, with `does.retry` or `does.useKey` where that helps. */
export function faultBox(turn, does) {
  const { title, detail, helps, waitS } = turn.error;
  const help = helps === "key" ? keyForm(turn, does) : helps === "retry" ? retryButton(waitS, () => does.retry(turn)) : null;
  return h("div", { class: "fault", role: "alert" }, h("strong", {}, title), h("p", {}, detail), help);
}

function keyForm(turn, does) {
  const id = `key-${turn.id}`;
  const input = h("input", { id, type: "password", ...UNWATCHED });
  const use = (event) => {
    event.preventDefault();
    if (input.value.trim()) does.useKey(turn, input.value.trim());
  };
  const button = h("button", { type: "submit", class: "button" }, "Use it and try again");
  return h("form", { class: "key-form", onsubmit: use }, h("label", { for: id }, "API key, kept until this page is closed"), input, button);
}

function retryButton(waitS, retry) {
  const button = h("button", { type: "button", class: "button", onclick: retry }, "Try again");
  const count = (left) => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left > 0) setTimeout(count, 1000, left - 1);
  };
  if (waitS && waitS <= LONGEST_COUNT_S) count(Math.ceil(waitS));
  return button;
}
