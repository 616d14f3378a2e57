// Files that are sent with a message: text, which goes into the message itself, and images, which are parts of it. They are read here;
// the text of a PDF is by the server.

import { explain } from "./errors.js";

const MAX_BYTES = 1 << 20;
const MAX_IMAGE_BYTES = 2.5 * (1 << 20); // in base64 still within what a server takes unless told otherwise
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/**
 * Returns the name and text of a file, or the name and data URL (`image`) of an image; `api` is asked for the text of a PDF, and whether
 * the model reads images. Throws an Error that says, for people, why it cannot be read and what to do.
 */
export async function readFile(file, api) {
  const { name, size } = file;
  if (/\.pdf$/i.test(name) || file.type === "application/pdf") return { name: plain(name), text: await readPdf(file, api) };
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return { name: plain(name), image: await readImage(file, api) };
  if (size > MAX_BYTES) throw new Error(`“${name}” is larger than 1 MiB. Attach the part that matters.`);
  const text = decode(await file.arrayBuffer());
  if (text === null) throw new Error(`“${name}” is not text. Attach files of text in UTF-8.`);
  if (!text.trim()) throw new Error(`“${name}” is empty.`);
  return { name: plain(name), text };
}

async function readImage(file, api) {
  const { name, size, type } = file;
  if (!(await readsImages(api))) throw new Error(`“${name}” is an image. The models here read text only.`);
  if (!IMAGES.includes(type)) throw new Error(`“${name}” is an image of another kind. Attach PNG, JPEG, WebP or GIF.`);
  if (size > MAX_IMAGE_BYTES) throw new Error(`“${name}” is larger than 2.5 MiB. Attach a smaller image.`);
  const reader = new FileReader();
  await new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = () => reject(new Error(`“${name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
  return reader.result;
}

async function readsImages(api) {
  try {
    return (await api.json("/props")).modalities.vision;
  } catch {
    return true; // then the server says so
  }
}

/** Returns whether a file is an image whose data URL shows nothing but the image. */
export function isImage(image) {
  return typeof image === "string" && IMAGES.some((type) => image.startsWith(`data:${type};base64,`));
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

/** Returns a message with its files of text, each in a code fence that none of its lines can close, and the names of its images. */
export function withFiles(content, files) {
  const blocks = files.map(({ name, text, image }) => {
    if (image) return `Image: ${name}`;
    const fence = "`".repeat(Math.max(3, longestRun(text) + 1));
    return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}

/** Returns the content of a message: a text, or the parts that images and text are. */
export function contentOf(content, files) {
  const images = files.filter(({ image }) => image);
  const text = withFiles(content, files.filter(({ image }) => !image));
  if (!images.length) return text;
  const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text ? [...parts, { type: "text", text }] : parts;
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
