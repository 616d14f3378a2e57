// Markdown as models write it, parsed into a plain tree. Pure: no DOM. Time is linear in the text but for nesting, which is limited.
//
// Blocks: heading, paragraph, code, list, quote, table, rule, math. Spans: text, code, strong, em, del, link, break, math.
// HTML is text. An image is a link to it: loading one would tell another server that it was read.

import { parseSpans } from "./spans.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITER = /^:?-+:?$/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const CLOSING = { "$$": "$$", "\\[": "\\]" };
const MAX_FORMULA_LINES = 60;

/**
 * Returns the blocks of a text whose lines end with a line feed. Each has its source as `raw`, equal source, equal block; and where it
 * starts: what is read before it does not matter to it.
 */
export function parseMarkdown(text) {
  return parseBlocks(text.split("\n"), 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  for (let at = 0, start = 0; at < lines.length; ) {
    const [block, end] = lines[at].trim() ? readBlock(lines, at, depth) : [null, at + 1];
    const raw = lines.slice(at, end).join("\n");
    if (block) blocks.push({ ...block, raw, start });
    start += raw.length + 1;
    at = end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return readCode(lines, at);
  if (heading) return [{ kind: "heading", level: heading[1].length, spans: parseSpans(titleOf(heading[2])) }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (startsTable(lines, at)) return readTable(lines, at);
  if (FORMULA.test(line)) return readFormula(lines, at) ?? readParagraph(lines, at, depth);
  return readParagraph(lines, at, depth);
}

/** A heading without the number signs that may close it. */
function titleOf(text) {
  const words = text.trim().split(" ");
  return (/^#+$/.test(words.at(-1)) ? words.slice(0, -1) : words).join(" ");
}

function readCode(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const language = info.trim().split(/\s+/)[0].toLowerCase();
  const closed = end < lines.length;
  return [{ kind: "code", language, text: lines.slice(at + 1, end).join("\n"), closed }, closed ? end + 1 : end];
}

/** A formula on lines of its own, up to the mark that closes it; null when there is none before an empty line. */
function readFormula(lines, at) {
  const [start, open] = FORMULA.exec(lines[at]);
  const inside = [lines[at].slice(start.length).trim()];
  for (let end = at; end < lines.length && end < at + MAX_FORMULA_LINES && lines[end].trim(); end += 1) {
    if (end > at) inside.push(lines[end].trim());
    const closing = inside.at(-1).indexOf(CLOSING[open]);
    if (closing < 0) continue;
    if (closing + 2 < inside.at(-1).replace(/[.,;]$/, "").length) return null;
    const text = [...inside.slice(0, -1), inside.at(-1).slice(0, closing)].join("\n").trim();
    return text ? [{ kind: "math", text }, end + 1] : null;
  }
  return null;
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function readList(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const list = { kind: "list", ordered, first: ordered ? parseInt(first, 10) : 1, items: [] };
  while (at < lines.length) {
    const marker = ITEM.exec(lines[at]);
    if (!marker || /\d/.test(marker[2]) !== ordered || RULE.test(lines[at])) break;
    const [item, end] = readItem(lines, at, marker, depth);
    list.items.push(item);
    at = end;
  }
  return [list, at];
}

/** One item: its first line, what is indented below it, and lines that go on without indentation. */
function readItem(lines, at, marker, depth) {
  const outer = marker[1].length;
  const inner = outer + marker[2].length + Math.min(Math.max(marker[3].length, 1), 4);
  const own = [lines[at].slice(marker[0].length)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const indent = line.length - line.trimStart().length;
    if (!line.trim()) {
      const next = lines.slice(end, end + 3).find((other) => other.trim());
      if (next === undefined || next.length - next.trimStart().length <= outer) break;
      own.push("");
    } else if (indent >= outer + 2) {
      own.push(line.slice(Math.min(indent, inner)));
    } else if (!own.at(-1).trim() || startsBlock(lines, end)) {
      break;
    } else {
      own.push(line.trimStart());
    }
  }
  while (end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) end += 1;
  return [parseBlocks(own, depth + 1), end];
}

function startsBlock(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM, FORMULA].some((pattern) => pattern.test(line)) || startsTable(lines, at);
}

function startsTable(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !below.includes("-")) return false;
  const delimiters = cellsOf(below);
  return delimiters.every((cell) => DELIMITER.test(cell)) && cellsOf(lines[at]).length === delimiters.length;
}

function readTable(lines, at) {
  const align = cellsOf(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  const row = (line) => align.map((_, column) => parseSpans(cellsOf(line)[column] ?? ""));
  const head = row(lines[at]);
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(row(lines[end]));
  return [{ kind: "table", align, head, rows }, end];
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !(depth < MAX_DEPTH && startsBlock(lines, end))) end += 1;
  return [{ kind: "paragraph", spans: parseSpans(lines.slice(at, end).map(trimLine).join("\n")) }, end];
}

/** A line of a paragraph; two spaces at its end mean what a backslash there means. */
function trimLine(line) {
  return line.endsWith("  ") ? `${line.trim()}\\` : line.trim();
}
