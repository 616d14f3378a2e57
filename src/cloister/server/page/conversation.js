// Conversations as data. Pure but for random ids.
//
// A conversation: id, title (empty: its first question), folder (empty: none), turns.
// A turn: role (user, assistant, tool), content, files, reasoning, toolCalls, toolCallId, state (done, waiting, streaming, stopped,
// failed), error, exchange (what was sent and what came back), figures (counts and times of the answer), variants (other answers that
// stand beside this one until one is chosen) and label (what a variant was asked with).

import { contentOf, isImage, withFiles } from "./files.js";

const TITLE_LENGTH = 60;

/** Returns a conversation without turns. */
export function newConversation() {
  return { id: newId(), title: "", folder: "", turns: [] };
}

/** Returns a turn of a role. */
export function newTurn(role, fields = {}) {
  const said = { content: "", files: [], reasoning: "", toolCalls: [], variants: [], label: "" };
  return { id: newId(), role, ...said, state: "done", error: null, exchange: null, figures: null, ...fields };
}

/** Returns the name that a conversation was given, else its first question. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.turns.find((turn) => turn.role === "user");
  const line = (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line || "New conversation";
}

/** Returns whether every word stands somewhere in a conversation: its name, its folder, or what was said. */
export function mentions(conversation, words) {
  const texts = [titleOf(conversation), conversation.folder, ...conversation.turns.map((turn) => turn.content)];
  const whole = texts.join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => whole.includes(word));
}

/** Puts one of the answers that stand side by side in the place of all of them; returns what undoes it. */
export function choose(conversation, turn, chosen) {
  const { variants } = turn;
  const put = (one, other) => (conversation.turns = conversation.turns.map((at) => (at === one ? other : at)));
  turn.variants = [];
  put(turn, chosen);
  return () => {
    turn.variants = variants;
    put(chosen, turn);
  };
}

/** Removes every turn after the one given, and returns how many. */
export function cutAfter(conversation, turn) {
  return conversation.turns.splice(conversation.turns.indexOf(turn) + 1).length;
}

/** Removes the answer given and all that follows, with the answers to its tool calls. */
export function cutFrom(conversation, turn) {
  conversation.turns.splice(conversation.turns.indexOf(turn));
}

/** Returns the messages of a request: what was said so far, without answers that never came. */
export function messagesOf(turns, systemPrompt) {
  const system = systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : [];
  return [...system, ...turns.filter(says).map(messageOf)];
}

/** Returns the calls of the last answer that nobody has answered yet. */
export function openCalls(conversation) {
  const at = conversation.turns.findLastIndex((turn) => turn.role === "assistant");
  if (at < 0) return [];
  const answered = new Set(conversation.turns.slice(at + 1).map((turn) => turn.toolCallId));
  return conversation.turns[at].toolCalls.filter((call) => !answered.has(call.id));
}

/** Returns a conversation as JSON for a file: what was said, what it was asked with, and neither a key nor presets. */
export function exportJson(conversation, settings, now) {
  const { presets, theme, keep, hidden_profile, ...asked } = settings;
  const turns = conversation.turns.map(({ id, exchange, variants, label, ...rest }) => rest);
  const { title, folder } = conversation;
  const whole = { format: "cloister-conversation", version: 1, exported_at: now.toISOString(), title, folder };
  return JSON.stringify({ ...whole, settings: asked, turns, messages: messagesOf(conversation.turns, settings.system) }, null, 2);
}

/** Returns the conversation of a file that `exportJson` wrote, or null when it is none. Of each turn only what is known here is taken. */
export function importJson(text) {
  try {
    const { format, version, title = "", folder = "", turns } = JSON.parse(text);
    if (format !== "cloister-conversation" || version !== 1) return null;
    return { ...newConversation(), title: String(title), folder: String(folder), turns: turns.map(importTurn) };
  } catch {
    return null;
  }
}

function importTurn({ role, content, files = [], reasoning = "", toolCalls = [], toolCallId }) {
  const called = toolCalls.flatMap(({ id, function: { name, arguments: said } }) => [id, name, said]);
  const attached = files.map(({ name, text, image }) => (isImage(image) ? { name, image } : { name, text }));
  const texts = [content, reasoning, ...called, ...attached.flatMap(({ name, text, image }) => [name, image ?? text])];
  const isKnown = ["user", "assistant", "tool"].includes(role) && texts.every((text) => typeof text === "string");
  if (!isKnown) throw new TypeError("not a turn");
  return newTurn(role, { content, files: attached, reasoning, toolCalls, ...(role === "tool" && { toolCallId: String(toolCallId) }) });
}

/** Returns a conversation as Markdown for people. */
export function exportMarkdown(conversation, settings) {
  const parts = [`# ${titleOf(conversation)}`];
  if (settings.system.trim()) parts.push("## System", settings.system);
  for (const turn of conversation.turns) {
    parts.push(`## ${speaker(turn)}`);
    const said = withFiles(turn.content, turn.files);
    if (said) parts.push(said);
    for (const call of turn.toolCalls) parts.push(`Calls \`${call.function.name}\`:\n\n\`\`\`json\n${call.function.arguments}\n\`\`\``);
    if (turn.error) parts.push(`*${turn.error.title}.*`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** Returns who speaks in a turn. */
export function speaker(turn) {
  return { user: "You", assistant: "Answer", tool: "Tool result" }[turn.role];
}

function says(turn) {
  return turn.role !== "assistant" || turn.content !== "" || turn.toolCalls.length > 0;
}

function messageOf(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.toolCallId, content: turn.content };
  if (turn.toolCalls.length === 0) return { role: turn.role, content: contentOf(turn.content, turn.files) };
  const calls = turn.toolCalls.map(({ id, function: called }) => ({ id, type: "function", function: called }));
  return { role: turn.role, content: turn.content || null, tool_calls: calls };
}

function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
