// Talks to the server that this page came from, and to no other.

import { EventParser } from "./sse.js";

const DONE = "[DONE]";

/** A reply that is no answer. `status` is 0 when there was none at all. */
export class ApiError extends Error {
  constructor(status, { message = "", code = null, param = null } = {}, retryAfterS = null) {
    super(message);
    Object.assign(this, { status, code, param, retryAfterS });
  }
}

/** The API with a key, which is kept here and nowhere else. */
export class Api {
  constructor() {
    this.key = "";
  }

  async json(path) {
    return (await this.request(path)).json();
  }

  async text(path, signal) {
    return (await this.request(path, { signal })).text();
  }

  /** Yields what a chat request is answered with: chunks of a stream, or one whole answer. */
  async *chat(body, signal) {
    const headers = { "Content-Type": "application/json" };
    const reply = await this.request("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!body.stream) {
      yield await reply.json();
      return;
    }
    for await (const data of readEvents(reply)) {
      if (data === DONE) return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.type === "server_error" ? 503 : 400, event.error);
      yield event;
    }
    throw new ApiError(0, { code: "cut_off" });
  }

  async request(path, { headers = {}, ...options } = {}) {
    const authorization = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const request = { ...options, headers: { ...headers, ...authorization }, cache: "no-store", credentials: "omit" };
    let reply;
    try {
      reply = await fetch(path, request);
    } catch (error) {
      throw error.name === "AbortError" ? error : new ApiError(0);
    }
    if (reply.ok) return reply;
    throw new ApiError(reply.status, await errorOf(reply), retryAfter(reply));
  }
}

async function* readEvents(reply) {
  const parser = new EventParser();
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let piece = await read(reader); !piece.done; piece = await read(reader)) yield* parser.push(piece.value);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(0, { code: "cut_off" });
  }
}

async function errorOf(reply) {
  try {
    return (await reply.json()).error ?? {};
  } catch {
    return {};
  }
}

function retryAfter(reply) {
  const seconds = Number(reply.headers.get("Retry-After"));
  return Number.isFinite(seconds) && seconds > 0 ? seconds : null;
}
