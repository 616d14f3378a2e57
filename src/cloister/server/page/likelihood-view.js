// The dialog that shows an answer token by token, and what else could have stood at each place.

import { showDialog } from "./dialog.js";
import { h } from "./dom.js";
import { likelihoodsOf, percentOf } from "./likelihoods.js";

const HINT = "The stronger the colour, the less likely the token was to the model, before temperature. Choose one, or move with the arrow keys.";
const LEVELS = [0.9, 0.6, 0.3, 0.1];

/** Opens the dialog for an exchange that was asked for log-probabilities. */
export function showLikelihoods(exchange) {
  const entries = likelihoodsOf(exchange);
  const others = h("div", { class: "others", "aria-live": "polite" });
  const tokens = entries.map((entry) => tokenButton(entry));
  const select = (at) => {
    tokens.forEach((token, i) => {
      token.tabIndex = i === at ? 0 : -1;
      token.setAttribute("aria-pressed", String(i === at));
    });
    others.replaceChildren(table(entries[at]));
  };
  const text = h("div", { class: "tokens", role: "group", "aria-label": "Tokens of the answer" }, ...tokens);
  text.addEventListener("click", ({ target }) => tokens.includes(target) && select(tokens.indexOf(target)));
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = tokens[tokens.indexOf(document.activeElement) + by];
    if (!next) return;
    event.preventDefault();
    next.focus();
    select(tokens.indexOf(next));
  });
  select(0);
  showDialog("What else it could have said", h("div", { class: "panel-body" }, h("p", { class: "hint" }, HINT), text, others), true);
}

function tokenButton({ text, likelihood }) {
  const level = LEVELS.filter((limit) => likelihood < limit).length;
  return h("button", { type: "button", class: `token level-${level}`, "aria-label": `${JSON.stringify(text)}, ${percentOf(likelihood)}` }, visible(text));
}

function table({ text, likelihood, others }) {
  const known = others.some(([other]) => other === text) ? others : [...others, [text, likelihood]];
  const row = ([other, chance]) => {
    const said = other === text ? " (said)" : "";
    const bar = h("meter", { value: chance, "aria-label": `Likelihood of ${JSON.stringify(other)}` });
    return h("tr", {}, h("th", { scope: "row" }, h("code", {}, JSON.stringify(other)), said), h("td", {}, bar), h("td", { class: "align-end" }, percentOf(chance)));
  };
  return h("table", {}, h("caption", { class: "visually-hidden" }, "Likeliest tokens at this place"), h("tbody", {}, ...known.map(row)));
}

/** Line ends are drawn, so that they can be chosen. */
function visible(text) {
  return text.replaceAll("\n", "↵\n") || "∅";
}
