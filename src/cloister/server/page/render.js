// Draws what `parseMarkdown` returns. Only nodes are made, and only of kinds that are named here.

import { h, icon, mathml } from "./dom.js";
import { highlight } from "./highlight.js";
import { parseMarkdown } from "./markdown.js";
import { parseTex } from "./tex.js";

const MAX_COLOURED = 100_000;

/** Keeps an element equal to a text that grows: blocks that did not change keep their nodes, and with them selection and focus. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "prose" });
    this.text = "";
    this.last = { raw: "", start: 0 };
  }

  /** Shows a text. Of one that only grew, what stands before its last block is not even read again. */
  show(given) {
    const text = given.replace(/\r\n?/g, "\n");
    const { raw, start } = text.startsWith(this.text) ? this.last : { raw: "", start: 0 };
    const blocks = parseMarkdown(text.slice(start));
    const isSame = blocks.length > 0 && blocks[0].raw === raw;
    if (start === 0 && !isSame) this.element.replaceChildren();
    else if (!isSame) this.element.lastChild?.remove();
    this.element.append(...blocks.slice(isSame ? 1 : 0).map(drawBlock));
    this.text = text;
    this.last = blocks.length ? { raw: blocks.at(-1).raw, start: start + blocks.at(-1).start } : { raw: "", start: 0 };
  }
}

/** Returns a box of code with its language and a button that copies it. */
export function codeBox(text, language, label = language || "text") {
  const head = h("div", { class: "code-head" }, h("span", {}, label), copyButton(() => text));
  const pre = h("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${label}` }, h("code", {}, ...drawCode(text, language)));
  return h("div", { class: "code-box" }, head, pre);
}

/** Returns a button that copies what `text()` returns and says so. */
export function copyButton(text, label = "Copy") {
  const says = h("span", { "aria-live": "polite" }, label);
  const button = h("button", { type: "button", class: "text-button" }, icon("copy"), says);
  const show = (word, isNews) => {
    says.textContent = word;
    button.toggleAttribute("data-news", isNews);
  };
  const tell = (word) => {
    show(word, true);
    setTimeout(show, 1500, label, false);
  };
  button.addEventListener("click", () => copyText(text()).then(() => tell("Copied"), () => tell("Not allowed")));
  return button;
}

/** Puts a text on the clipboard; over plain HTTP from another machine, where browsers have no clipboard API, by a selection. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "visually-hidden", readonly: true });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not allow it");
}

const BLOCKS = {
  heading: (block) => h(`h${Math.min(6, block.level + 1)}`, {}, ...drawSpans(block.spans)),
  paragraph: (block) => h("p", {}, ...drawSpans(block.spans)),
  code: (block) => codeBox(block.text, block.language),
  quote: (block) => h("blockquote", {}, ...block.blocks.map(drawBlock)),
  rule: () => h("hr"),
  math: (block) => h("div", { class: "math-box", tabindex: "0", role: "group", "aria-label": "Formula" }, drawMath(block.text, true)),
  list: (block) => {
    const items = block.items.map((blocks) => h("li", {}, ...drawItem(blocks)));
    return block.ordered ? h("ol", { start: block.first }, ...items) : h("ul", {}, ...items);
  },
  table: (block) => {
    const cells = (name, row) => row.map((spans, i) => h(name, { class: `align-${block.align[i]}` }, ...drawSpans(spans)));
    const head = h("thead", {}, h("tr", {}, ...cells("th", block.head)));
    const body = h("tbody", {}, ...block.rows.map((row) => h("tr", {}, ...cells("td", row))));
    return h("div", { class: "table-box", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {}, head, body));
  },
};

const SPANS = {
  text: (span) => span.text,
  code: (span) => h("code", {}, span.text),
  strong: (span) => h("strong", {}, ...drawSpans(span.spans)),
  em: (span) => h("em", {}, ...drawSpans(span.spans)),
  del: (span) => h("del", {}, ...drawSpans(span.spans)),
  break: () => h("br"),
  math: (span) => drawMath(span.text, span.isDisplay),
  link: (span) =>
    h("a", { href: span.url, rel: "noopener noreferrer nofollow", target: "_blank", title: span.url }, ...drawSpans(span.spans)),
};

/** A formula, or its source where that is not understood. */
function drawMath(text, isDisplay) {
  const formula = parseTex(text, isDisplay);
  return formula ? drawNode(formula) : h("code", { class: "tex" }, text);
}

function drawNode({ name, attributes, text, children }) {
  return mathml(name, attributes, text || null, ...children.map(drawNode));
}

function drawBlock(block) {
  return BLOCKS[block.kind](block);
}

function drawSpans(spans) {
  return spans.map((span) => SPANS[span.kind](span));
}

/** An item of one paragraph is set tight. */
function drawItem(blocks) {
  const [first, ...rest] = blocks;
  return first?.kind === "paragraph" ? [...drawSpans(first.spans), ...rest.map(drawBlock)] : blocks.map(drawBlock);
}

function drawCode(text, language) {
  if (text.length > MAX_COLOURED) return [text];
  return highlight(text, language).map(([kind, part]) => (kind === "plain" ? part : h("span", { class: `code-${kind}` }, part)));
}
