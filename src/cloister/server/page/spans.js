// The inside of a paragraph of Markdown: marks, links, code and formulas. Pure: no DOM. Time is linear in the text but for nesting.

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
    if (char === "\\" && this.text[at + 1] === "(") return this.formula(at, "\\(", "\\)") ?? this.say("(", at + 2);
    if (char === "\\" && this.text[at + 1] === "[") return this.formula(at, "\\[", "\\]") ?? this.say("[", at + 2);
    if (char === "$") return this.dollars(at);
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

  formula(at, open, close) {
    const from = at + open.length;
    const end = this.find(close, from);
    const text = end < 0 ? "" : this.text.slice(from, end).trim();
    return text ? this.add({ kind: "math", text, isDisplay: open === "$$" || open === "\\[" }, end + close.length) : null;
  }

  /** A formula between dollar signs. Prices are none: see https://pandoc.org/MANUAL.html#math for where a sign opens and closes. */
  dollars(at) {
    if (this.text[at + 1] === "$") return this.formula(at, "$$", "$$") ?? this.say("$$", at + 2);
    const end = this.find("$", at + 1);
    const text = end < 0 ? "" : this.text.slice(at + 1, end);
    const isFormula = text && text === text.trim() && !/\d/.test(this.text[end + 1] ?? "") && !WORD.test(this.text[at - 1] ?? " ");
    const isPrice = /^\d/.test(text) && /\s/.test(text) && !/[\\^_=+<>*/]/.test(text);
    return isFormula && !isPrice ? this.formula(at, "$", "$") : this.say("$", at + 1);
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
