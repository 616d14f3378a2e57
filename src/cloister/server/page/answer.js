// Puts an answer together from what the server sends, and counts. Pure: it is told the time.

const MIN_SPAN_MS = 100;

/** Adds a chunk of a stream, or a whole answer, to a turn. */
export function takeChunk(turn, chunk, nowMs) {
  turn.exchange.response.push(chunk);
  const figures = turn.figures;
  if (chunk.usage) figures.usage = chunk.usage;
  if (chunk.model) figures.model = chunk.model;
  const choice = chunk.choices?.find(({ index }) => !index); // one answer is shown, whatever `n` is
  if (!choice) return;
  const said = choice.delta ?? choice.message ?? {};
  const reasoning = said.reasoning_content ?? said.reasoning ?? "";
  turn.content += said.content ?? "";
  turn.reasoning += reasoning;
  for (const delta of said.tool_calls ?? []) takeCall(turn.toolCalls, delta);
  if (choice.finish_reason) figures.finish = choice.finish_reason;
  if (said.content || reasoning || said.tool_calls?.length) {
    figures.firstMs ??= nowMs;
    figures.lastMs = nowMs;
  }
}

/** Adds one piece of a tool call: the first has its name, all have a part of its arguments. */
function takeCall(calls, delta) {
  const index = delta.index ?? calls.length;
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.function.name += delta.function.name;
  call.function.arguments += delta.function?.arguments ?? "";
}

/** Returns the figures of an answer that begins now; `continues` one that goes on after a cut. */
export function newFigures(nowMs, continues = false) {
  return { sentMs: nowMs, firstMs: null, lastMs: null, usage: null, model: null, finish: null, continues };
}

/** Returns the figures as pairs of a short text and what it means: tokens, speed, time to first token, prompt. */
export function describeFigures({ sentMs, firstMs, lastMs, usage, continues }) {
  const parts = [];
  const count = usage?.completion_tokens;
  if (count !== undefined) parts.push([`${count} ${continues ? "more " : ""}${tokens(count)}`, "Length of the answer"]);
  if (count > 0 && firstMs !== null) parts.push(speed(count, sentMs, firstMs, lastMs));
  if (firstMs !== null) parts.push(wait(firstMs - sentMs, lastMs > firstMs));
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const reused = cached ? `, ${cached} cached` : "";
  if (usage) parts.push([`${usage.prompt_tokens} prompt ${tokens(usage.prompt_tokens)}${reused}`, "Everything that was sent; cached tokens were not computed again"]);
  return parts;
}

/** Tokens per second after the first; of an answer too quick or too whole to time its parts, from the question on. */
function speed(count, sentMs, firstMs, lastMs) {
  const isTimed = count > 1 && lastMs - firstMs >= MIN_SPAN_MS;
  const perSecond = isTimed ? (count - 1) / (lastMs - firstMs) : count / Math.max(1, lastMs - sentMs);
  return [`${number(perSecond * 1000)} tokens/s`, isTimed ? "Speed after the first token" : "Speed from the question to the end"];
}

function wait(ms, isFirst) {
  return isFirst ? [`${time(ms)} to first token`, "Time from the question to the first token"] : [`answered in ${time(ms)}`, "Time from the question to the answer"];
}

function tokens(count) {
  return count === 1 ? "token" : "tokens";
}

function time(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`;
}

function number(value) {
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(2);
}
