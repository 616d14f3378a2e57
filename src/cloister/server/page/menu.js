// A button that opens a short list of actions. The list is the browser's own popover: Esc or a press elsewhere closes it.

import { h, icon, iconButton } from "./dom.js";

const GAP_PX = 4;

/**
 * Returns a button and its list.
 * @param actions returns what can be done now: lists of icon, words and what does it. Asked for each time the list opens.
 */
export function menuButton(label, actions) {
  const list = h("div", { class: "menu", popover: "auto" });
  const button = iconButton("more", label, null);
  const close = () => list.hidePopover();
  const row = ([drawing, words, work], i) => {
    const act = () => {
      close();
      work();
    };
    return h("button", { type: "button", class: "menu-row", autofocus: i === 0, onclick: act }, icon(drawing), words);
  };
  button.popoverTargetElement = list;
  list.addEventListener("beforetoggle", ({ newState }) => {
    if (newState !== "open") return removeEventListener("scroll", close, true);
    list.replaceChildren(...actions().map(row));
    place(list, button.getBoundingClientRect());
    addEventListener("scroll", close, true);
  });
  list.addEventListener("keydown", (event) => step(event, list));
  return [button, list];
}

/** Puts the list under its button, or above it in the lower half of the window, and never over an edge. */
function place({ style }, { top, right, bottom, left }) {
  const isLow = bottom > innerHeight / 2;
  const isRight = left > innerWidth / 2;
  style.inset = "auto";
  if (isLow) style.bottom = `${innerHeight - top + GAP_PX}px`;
  else style.top = `${bottom + GAP_PX}px`;
  if (isRight) style.right = `${Math.max(GAP_PX, innerWidth - right)}px`;
  else style.left = `${Math.max(GAP_PX, left)}px`;
}

function step(event, list) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const rows = [...list.children];
  rows.at((rows.indexOf(document.activeElement) + by) % rows.length).focus();
}
