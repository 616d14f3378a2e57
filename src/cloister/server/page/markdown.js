// Markdown as models write it, parsed into a plain tree. Pure: no DOM. Time is linear in the text but for nesting, which is limited.
//
// Blocks: heading, paragraph, code, list, quote, table, rule. Spans: text, code, strong, em, del, link, break.
// HTML is text. An image is a link to it: loading one would tell another server that it was read.

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITER = /^:?-+:?$/;

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
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || startsTable(lines, at);
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

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const BARE_LINK = /https?:\/\/[^\s<>"'`|\\^{}]{1,2000}/y;
const MAX_URL = 1024;
const MAX_TRIES = 64;
const MARKS = [
  ["***", (spans) => ({ kind: "strong", spans: [{ kind: "em", spans }] })],
  ["**", (spans) => ({ kind: "strong", spans })],
  ["__", (spans) => ({ kind: "strong", spans })],
  ["~~", (spans) => ({ kind: "del", spans })],
  ["*", (spans) => ({ kind: "em", spans })],
  ["_", (spans) => ({ kind: "em", spans })],
];

/** Returns the spans of a paragraph. */
export function parseSpans(text) {
  return new SpanReader(text).read();
}

class SpanReader {
  constructor(text) {
    this.text = text;
    this.spans = [];
    this.plain = "";
    this.known = new Map();
  }

  read() {
    let at = 0;
    while (at < this.text.length) at = this.step(at);
    this.flush();
    return this.spans;
  }

  /** Reads one span or one character and returns where the next begins. */
  step(at) {
    const char = this.text[at];
    if (char === "\\" && ESCAPABLE.test(this.text[at + 1] ?? "")) return this.say(this.text[at + 1], at + 2);
    if (char === "\\" && this.text[at + 1] === "\n") return this.add({ kind: "break" }, at + 2);
    if (char === "`") return this.code(at);
    if (char === "!" && this.text[at + 1] === "[") return this.link(at, at + 1) ?? this.say("!", at + 1);
    if (char === "[") return this.link(at, at) ?? this.say("[", at + 1);
    if (char === "<") return this.angleLink(at) ?? this.say("<", at + 1);
    if (char === "h") return this.bareLink(at) ?? this.say("h", at + 1);
    if (char === "*" || char === "_" || char === "~") return this.emphasis(at) ?? this.run(at);
    return this.say(char, at + 1);
  }

  say(text, next) {
    this.plain += text;
    return next;
  }

  add(span, next) {
    this.flush();
    this.spans.push(span);
    return next;
  }

  flush() {
    if (this.plain) this.spans.push({ kind: "text", text: this.plain });
    this.plain = "";
  }

  code(at) {
    let ticks = 1;
    while (this.text[at + ticks] === "`") ticks += 1;
    const fence = "`".repeat(ticks);
    const end = this.closer(fence, at + ticks, (before, past) => past - before === ticks);
    if (end < 0) return this.say(fence, at + ticks);
    const inner = this.text.slice(at + ticks, end).replaceAll("\n", " ");
    return this.add({ kind: "code", text: /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner }, end + ticks);
  }

  link(at, open) {
    const middle = this.find("](", open + 1);
    if (middle < 0) return null;
    const end = this.closing(middle + 2);
    if (end < 0) return null;
    const label = this.text.slice(open + 1, middle);
    if (label.includes("[") && !label.includes("]")) return null;
    const url = safeUrl(this.text.slice(middle + 2, end).trim().split(/\s+["'(]/)[0]);
    if (url === null) return this.say(this.text.slice(at, end + 1), end + 1);
    const spans = open === at ? plainSpans(label) : [{ kind: "text", text: `image: ${label || url}` }];
    return this.add({ kind: "link", url, spans }, end + 1);
  }

  /** Where the address of a link ends: at the parenthesis that closes it, within one line. */
  closing(from) {
    let depth = 1;
    for (let at = from; at < this.text.length && at < from + MAX_URL; at += 1) {
      const char = this.text[at];
      if (char === "\n") return -1;
      if (char === "(") depth += 1;
      if (char === ")") depth -= 1;
      if (depth === 0) return at;
    }
    return -1;
  }

  angleLink(at) {
    const end = this.find(">", at);
    if (end < 0) return null;
    const inner = this.text.slice(at + 1, Math.min(end, at + MAX_URL));
    const url = /\s/.test(inner) ? null : safeUrl(inner);
    return url === null ? null : this.add({ kind: "link", url, spans: [{ kind: "text", text: inner }] }, end + 1);
  }

  bareLink(at) {
    if (WORD.test(this.text[at - 1] ?? " ")) return null;
    BARE_LINK.lastIndex = at;
    const found = BARE_LINK.exec(this.text);
    if (!found) return null;
    let shown = found[0].replace(/[.,;:!?*_~\]]+$/, "");
    if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
    const url = safeUrl(shown);
    return url === null ? null : this.add({ kind: "link", url, spans: [{ kind: "text", text: shown }] }, at + shown.length);
  }

  emphasis(at) {
    for (const [mark, make] of MARKS) {
      if (!this.text.startsWith(mark, at) || !this.opens(at, mark)) continue;
      const from = at + mark.length;
      const end = this.closer(mark, from, (before, past) => before > from && this.closes(before, past, mark));
      if (end < 0) continue;
      return this.add(make(parseSpans(this.text.slice(from, end))), end + mark.length);
    }
    return null;
  }

  opens(at, mark) {
    const after = this.text[at + mark.length] ?? " ";
    return /\S/.test(after) && after !== mark[0] && !(mark[0] === "_" && WORD.test(this.text[at - 1] ?? " "));
  }

  closes(before, past, mark) {
    const length = past - before;
    const fits = length === mark.length || (mark.length > 1 && length > mark.length);
    return fits && /\S/.test(this.text[before - 1]) && !(mark[0] === "_" && WORD.test(this.text[past] ?? " "));
  }

  /** Where a closing mark begins: the end of the next run of its character that will do, or -1. */
  closer(mark, from, willDo) {
    let before = this.find(mark, from);
    for (let tries = 0; before >= 0 && tries < MAX_TRIES; tries += 1) {
      let past = before;
      while (this.text[past] === mark[0]) past += 1;
      if (willDo(before, past)) return past - mark.length;
      before = this.find(mark, past);
    }
    return -1;
  }

  /** Marks that open nothing, as they stand: none of them is tried again. */
  run(at) {
    let end = at;
    while (this.text[end] === this.text[at]) end += 1;
    return this.say(this.text.slice(at, end), end);
  }

  /** As indexOf, but remembers: many openings without an end cost no more than one. */
  find(needle, from) {
    const known = this.known.get(needle);
    if (known && from >= known.from && (known.at < 0 || from <= known.at)) return known.at;
    const at = this.text.indexOf(needle, from);
    this.known.set(needle, { from, at });
    return at;
  }
}

/** Spans of a link's text: everything but links. */
function plainSpans(label) {
  const unlinked = (spans) =>
    spans.flatMap((span) => {
      if (span.kind === "link") return unlinked(span.spans);
      return span.spans ? [{ ...span, spans: unlinked(span.spans) }] : [span];
    });
  return unlinked(parseSpans(label));
}

/** Returns an address that may be a link, or null: http, https and mailto alone lead out of this page. */
export function safeUrl(text) {
  const bare = text.replace(/^<|>$/g, "");
  if (!/^(https?:\/\/|mailto:)[^\s\u0000-\u001f]+$/i.test(bare)) return null;
  try {
    return new URL(bare).href;
  } catch {
    return null;
  }
}
