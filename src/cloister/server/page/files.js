// Files that are sent with a message: text, which is read here and goes into the message itself.

const MAX_BYTES = 1 << 20;

/** Returns the name and text of a file. Throws an Error that says, for people, why it cannot be read and what to do. */
export async function readTextFile(file) {
  const { name, size } = file;
  if (/\.pdf$/i.test(name) || file.type === "application/pdf") {
    throw new Error(`“${name}” is a PDF. Save it as text first, for example with pdftotext, and attach that.`);
  }
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") throw new Error(`“${name}” is an image. The models here read text only.`);
  if (size > MAX_BYTES) throw new Error(`“${name}” is larger than 1 MiB. Attach the part that matters.`);
  const text = decode(await file.arrayBuffer());
  if (text === null) throw new Error(`“${name}” is not text. Attach files of text in UTF-8.`);
  if (!text.trim()) throw new Error(`“${name}” is empty.`);
  return { name: name.replace(/\p{Cc}/gu, " "), text };
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
