// Mathematics as models write it in TeX, read into a tree of MathML (W3C MathML Core). Pure: no DOM. What is not known here makes the
// whole formula null, and it is shown as it was written: no formula is drawn wrong in silence.
//
// A node: name of an element, attributes, children (nodes) or text.

import {
  ACCENTS, ALIGNED, FENCES, FUNCTIONS, IGNORED, INTEGRALS, LARGE, LETTERS, LIMITED, MATRICES, OPERATORS, SPACES, STRETCHED, inAlphabet, isAlphabet,
} from "./tex-names.js";

const MAX_LENGTH = 4000;
const MAX_DEPTH = 60;
const TOKEN = /\\([a-zA-Z]+)|\\([^a-zA-Z])|\s+|(\d+(?:\.\d+)?)|([^])/gy;

/** Returns the `math` node of a formula, or null when it is not understood. */
export function parseTex(text, isDisplay) {
  if (text.length > MAX_LENGTH) return null;
  try {
    const reader = new Reader(text, isDisplay);
    const rows = reader.rows(null);
    const children = rows.length > 1 || rows[0].length > 1 ? [table(rows, "aligned")] : rows[0][0];
    return node("math", { display: isDisplay ? "block" : "inline" }, children);
  } catch (error) {
    if (error instanceof NotUnderstood) return null;
    throw error;
  }
}

class NotUnderstood extends Error {}

function node(name, attributes, inside) {
  return typeof inside === "string" ? { name, attributes, text: inside, children: [] } : { name, attributes, text: "", children: inside };
}

const row = (children) => (children.length === 1 ? children[0] : node("mrow", {}, children));
const operator = (text, attributes = {}) => node("mo", attributes, text);

class Reader {
  constructor(text, isDisplay) {
    this.tokens = [...text.matchAll(TOKEN)].map(([whole, word, mark, number, char]) => ({ whole, command: word ?? mark, number, char, isSpace: !whole.trim() }));
    this.at = 0;
    this.depth = 0;
    this.isDisplay = isDisplay;
  }

  peek() {
    while (this.tokens[this.at]?.isSpace) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at += 1;
    if (!token) throw new NotUnderstood("the formula ends too early");
    return token;
  }

  isAt(text) {
    return this.peek()?.whole === text;
  }

  expect(text) {
    if (this.next().whole !== text) throw new NotUnderstood(`no ${text}`);
  }

  /** Reads rows of cells up to `\end`, or to the end of the formula. Each cell is a list of nodes. */
  rows(end) {
    const rows = [[[]]];
    for (;;) {
      const token = this.peek();
      if (!token || (end && token.whole === "\\end")) break;
      if (token.whole === "&") rows.at(-1).push([]);
      else if (token.whole === "\\\\") rows.push([[]]);
      else {
        rows.at(-1).at(-1).push(this.term());
        continue;
      }
      this.at += 1;
    }
    if (end) {
      this.at += 1;
      if (this.name() !== end) throw new NotUnderstood(`no end of ${end}`);
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].length) rows.pop();
    return rows;
  }

  /** Reads an atom with what stands below and above it. */
  term() {
    const base = this.atom();
    let below, prime, power;
    for (;;) {
      if (this.isAt("_") && !below) below = this.script();
      else if (this.isAt("^") && !power) power = this.script();
      else if (this.isAt("'") && !prime) prime = this.primes();
      else break;
    }
    const above = prime && power ? row([prime, power]) : (prime ?? power);
    if (!below && !above) return base;
    const isStacked = base.takesLimits && this.isDisplay;
    const [one, two, both] = isStacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return node(both, {}, [base, below, above]);
    return below ? node(one, {}, [base, below]) : node(two, {}, [base, above]);
  }

  script() {
    this.at += 1;
    return this.argument();
  }

  primes() {
    let count = 0;
    for (; this.isAt("'"); count += 1) this.at += 1;
    return operator("′".repeat(count));
  }

  /** Reads a group in braces, or one atom: of a number, its first digit. */
  argument() {
    const number = this.peek()?.number;
    if (!number || number.length === 1) return this.atom();
    this.tokens[this.at] = { whole: number.slice(1), number: number.slice(1) };
    return node("mn", {}, number[0]);
  }

  group() {
    const children = [];
    while (!this.isAt("}")) children.push(this.term());
    this.at += 1;
    return row(children);
  }

  /** Reads a group in braces, a command with its arguments, or one character. */
  atom() {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new NotUnderstood("too deep");
    const made = this.readAtom(this.next());
    this.depth -= 1;
    return made;
  }

  readAtom(token) {
    if (token.whole === "{") return this.group();
    if (token.command !== undefined) return this.command(token.command);
    if (token.number) return node("mn", {}, token.number);
    if ("}_^&$#%".includes(token.char)) throw new NotUnderstood(`a ${token.char} that belongs to nothing`);
    if (token.char === "~") return space(0.25);
    if (/\p{L}/u.test(token.char)) return node("mi", {}, token.char);
    return operator({ "-": "−", "*": "∗", "/": "/" }[token.char] ?? token.char, "()[]|".includes(token.char) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (LETTERS.has(name)) return node("mi", /^\p{Lu}/u.test(name) ? { mathvariant: "normal" } : {}, LETTERS.get(name));
    if (OPERATORS.has(name)) return operator(OPERATORS.get(name), { stretchy: "false" });
    if (LARGE.has(name)) return { ...operator(LARGE.get(name)), takesLimits: true };
    if (INTEGRALS.has(name)) return operator(INTEGRALS.get(name));
    if (FUNCTIONS.has(name)) return { ...node("mi", {}, name), takesLimits: LIMITED.has(name) };
    if (ACCENTS.has(name)) return this.accent(name);
    if (SPACES.has(name)) return space(SPACES.get(name));
    if (isAlphabet(name)) return this.letters(name);
    if (IGNORED.has(name)) return this.peek() && !this.isAt("}") && !this.isAt("&") && !this.isAt("\\\\") ? this.atom() : row([]);
    const known = COMMANDS[name];
    if (!known) throw new NotUnderstood(`the command ${name}`);
    return known(this);
  }

  accent(name) {
    const mark = operator(ACCENTS.get(name), { stretchy: String(STRETCHED.has(name)) });
    return node("mover", { accent: "true" }, [this.argument(), mark]);
  }

  letters(name) {
    if (name === "operatorname" && this.isAt("*")) this.at += 1;
    const text = this.isAt("{") ? this.text().trim() : this.next().whole;
    if (/[\\${}^_&]/.test(text)) throw new NotUnderstood(`${name} of more than letters`);
    const isNumber = /^\d+$/.test(text);
    return node(isNumber ? "mn" : "mi", isNumber || text.length > 1 ? {} : { mathvariant: "normal" }, inAlphabet(text, name));
  }

  /** Reads a group in braces as it stands, spaces and all. */
  text() {
    this.expect("{");
    let text = "";
    for (let depth = 1; ; this.at += 1) {
      const token = this.tokens[this.at];
      if (!token) throw new NotUnderstood("a text without an end");
      if (token.whole === "{") depth += 1;
      if (token.whole === "}") depth -= 1;
      if (depth === 0) break;
      text += token.command !== undefined && /[^a-zA-Z]/.test(token.command) ? token.command : token.whole;
    }
    this.at += 1;
    return text;
  }

  name() {
    return this.text().trim();
  }

  /** Reads the fence after `\left`, `\right` or `\middle`. */
  fence() {
    const { whole, command, char } = this.next();
    const found = command !== undefined ? OPERATORS.get(command) : FENCES[char ?? whole];
    if (found === undefined) throw new NotUnderstood(`the fence ${whole}`);
    return operator(found, { stretchy: "true", fence: "true" });
  }

  fenced() {
    const children = [this.fence()];
    while (!this.isAt("\\right")) children.push(this.isAt("\\middle") ? this.middle() : this.term());
    this.at += 1;
    return node("mrow", {}, [...children, this.fence()]);
  }

  middle() {
    this.at += 1;
    return this.fence();
  }

  fraction(attributes = {}) {
    return node("mfrac", attributes, [this.argument(), this.argument()]);
  }

  root() {
    if (!this.isAt("[")) return node("msqrt", {}, [this.argument()]);
    this.at += 1;
    const degree = [];
    while (!this.isAt("]")) degree.push(this.term());
    this.at += 1;
    return node("mroot", {}, [this.argument(), row(degree)]);
  }

  environment() {
    const name = this.name();
    if (name === "array") this.text(); // where its columns stand
    const rows = this.rows(name);
    if (name === "cases") return node("mrow", {}, [operator("{", { stretchy: "true", fence: "true" }), table(rows, "cases")]);
    if (ALIGNED.has(name)) return table(rows, name === "array" ? "matrix" : "aligned");
    const fences = Object.hasOwn(MATRICES, name) ? MATRICES[name] : null;
    if (!fences) throw new NotUnderstood(`the environment ${name}`);
    const [open, close] = fences.map((text) => operator(text, { stretchy: "true", fence: "true" }));
    return node("mrow", {}, [open, table(rows, "matrix"), close]);
  }
}

const stack = (name, mark) => (reader) => ({ ...node(name, {}, [reader.argument(), operator(mark, { stretchy: "true" })]), takesLimits: true });
const COMMANDS = {
  frac: (reader) => reader.fraction(),
  dfrac: (reader) => reader.fraction({ displaystyle: "true" }),
  tfrac: (reader) => reader.fraction({ displaystyle: "false" }),
  binom: (reader) => node("mrow", {}, [operator("("), reader.fraction({ linethickness: "0" }), operator(")")]),
  sqrt: (reader) => reader.root(),
  left: (reader) => reader.fenced(),
  begin: (reader) => reader.environment(),
  text: (reader) => node("mtext", {}, reader.text()),
  textbf: (reader) => node("mtext", { class: "bold" }, reader.text()),
  textit: (reader) => node("mtext", { class: "slanted" }, reader.text()),
  textrm: (reader) => node("mtext", {}, reader.text()),
  mbox: (reader) => node("mtext", {}, reader.text()),
  underline: (reader) => node("munder", {}, [reader.argument(), operator("_", { stretchy: "true" })]),
  underbrace: stack("munder", "⏟"),
  overbrace: stack("mover", "⏞"),
  overset: (reader) => node("mover", {}, [reader.argument(), reader.argument()].reverse()),
  underset: (reader) => node("munder", {}, [reader.argument(), reader.argument()].reverse()),
  stackrel: (reader) => node("mover", {}, [reader.argument(), reader.argument()].reverse()),
  tag: (reader) => node("mtext", { class: "tag" }, `(${reader.text()})`),
  boxed: (reader) => node("mrow", { class: "boxed" }, [reader.argument()]),
  mod: () => operator("mod"),
  bmod: () => operator("mod"),
  pmod: (reader) => node("mrow", {}, [operator("("), node("mi", {}, "mod"), space(0.25), reader.argument(), operator(")")]),
  not: (reader) => operator(`${reader.argument().text}\u0338`),
};
Object.setPrototypeOf(COMMANDS, null);

function space(em) {
  return node("mspace", { width: `${em}em` }, []);
}

function table(rows, kind) {
  const cells = (cellsOfRow) => cellsOfRow.map((children) => node("mtd", {}, [row(children)]));
  return node("mtable", { class: kind, ...(kind === "aligned" && { displaystyle: "true" }) }, rows.map((cellsOfRow) => node("mtr", {}, cells(cellsOfRow))));
}
