// Light colouring of code: comments, texts, numbers and keywords, no grammar. Pure: returns pairs of kind and text, all of the text.

const WORDS = {
  c: "auto bool break case catch char class const continue default delete do double else enum extern false final float for goto if " +
    "inline int long namespace new nullptr operator private protected public return short signed sizeof static struct switch " +
    "template this throw true try typedef typename union unsigned using virtual void volatile while",
  go: "break case chan const continue default defer else false fallthrough for func go goto if import interface map nil package range " +
    "return select struct switch true type var",
  java: "abstract boolean break byte case catch char class continue default do double else enum extends false final finally float " +
    "for if implements import instanceof int interface long new null package private protected public return short static super " +
    "switch this throw throws true try void while",
  javascript: "async await break case catch class const continue default delete do else export extends false finally for from function " +
    "if import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var " +
    "void while yield",
  json: "true false null",
  python: "and as assert async await break class continue def del elif else except False finally for from global if import in is " +
    "lambda match None nonlocal not or pass raise return self True try while with yield",
  rust: "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref " +
    "return self Self static struct super trait true type unsafe use where while",
  shell: "case do done elif else esac exit export fi for function if in local return set then until while",
  sql: "add all alter and as asc begin between by case check column commit create cross database default delete desc distinct drop " +
    "else end exists explain foreign from full group having if in index inner insert into is join key left like limit not null " +
    "offset on or order outer primary references returning right rollback select set table then union unique update using vacuum " +
    "values view when where with",
};
const NAMES = {
  bash: "shell", "c++": "c", cpp: "c", cs: "java", h: "c", hpp: "c", js: "javascript", jsx: "javascript", kotlin: "java", py: "python",
  rs: "rust", sh: "shell", toml: "shell", ts: "javascript", tsx: "javascript", typescript: "javascript", yaml: "shell", yml: "shell",
  zsh: "shell",
};
const HASH_COMMENTS = new Set(["python", "shell"]);
const TEXTS = `"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?`;
const NUMBERS = "\\b\\d[\\w.]*";

/** Returns the tokens of a piece of code; a language that is not known is one token. */
export function highlight(text, language) {
  const name = NAMES[language] ?? language;
  if (!Object.hasOwn(WORDS, name)) return [["plain", text]];
  const words = new Set(WORDS[name].split(" "));
  const isSql = name === "sql";
  const tokens = [];
  let end = 0;
  for (const found of text.matchAll(patternOf(name))) {
    if (found.index > end) tokens.push(["plain", text.slice(end, found.index)]);
    end = found.index + found[0].length;
    const { comment, string, number, word } = found.groups;
    const known = word !== undefined && words.has(isSql ? word.toLowerCase() : word);
    tokens.push([comment ? "comment" : string ? "string" : number ? "number" : known ? "keyword" : "plain", found[0]]);
  }
  if (end < text.length) tokens.push(["plain", text.slice(end)]);
  return tokens;
}

function patternOf(name) {
  const comments = HASH_COMMENTS.has(name) ? "#[^\\n]*" : name === "sql" ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
  const texts = name === "python" ? `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${TEXTS}` : name === "javascript" ? `${TEXTS}|\`[^\`]*\`?` : TEXTS;
  return new RegExp(`(?<comment>${comments})|(?<string>${texts})|(?<number>${NUMBERS})|(?<word>[A-Za-z_]\\w*)`, "g");
}
