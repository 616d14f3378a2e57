// Files that are sent with a message: text, which goes into the message itself. It is read here; that of a PDF by the server.

import { explain } from "./errors.js";

const MAX_BYTES = 1 << 20;

/** Returns the name and text of a file; `api` is asked for that of a PDF. Throws an Error that says, for people, why it cannot be read and what to do. */
export async function readTextFile(file, api) {
  const { name, size } = file;
  if (/\.pdf$/i.test(name) || file.type === "application/pdf") return { name: plain(name), text: await readPdf(file, api) };
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") throw new Error(`“${name}” is an image. The models here read text only.`);
  if (size > MAX_BYTES) throw new Error(`“${name}” is larger than 1 MiB. Attach the part that matters.`);
  const text = decode(await file.arrayBuffer());
  if (text === null) throw new Error(`“${name}” is not text. Attach files of text in UTF-8.`);
  if (!text.trim()) throw new Error(`“${name}” is empty.`);
  return { name: plain(name), text };
}

async function readPdf(file, api) {
  const body = new FormData();
  body.append("file", file, "file.pdf"); // its name is nobody's business
  try {
    const { text } = await (await api.request("/v1/pdf/text", { method: "POST", body })).json();
    return text;
  } catch (error) {
    throw new Error(`“${file.name}” cannot be attached. ${error.message || explain(error).title}`);
  }
}

function plain(name) {
  return name.replace(/\p{Cc}/gu, " ");
}

/** Returns a message with its files, each in a code fence that none of its lines can close. */
export function withFiles(content, files) {
  const blocks = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, longestRun(text) + 1));
    return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}

function decode(buffer) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
    return text.includes("\0") ? null : text.replace(/\r\n?/g, "\n");
  } catch {
    return null;
  }
}

function longestRun(text) {
  return (text.match(/`+/g) ?? []).reduce((longest, run) => Math.max(longest, run.length), 0);
}
