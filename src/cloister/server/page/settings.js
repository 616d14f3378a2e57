// What the user set, as text fields hold it, and what a request makes of it. Pure.

export const DEFAULTS = Object.freeze({
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
  tools: "",
  tool_choice: "auto",
  format: "text",
  schema: "",
  more: "",
  likelihoods: false,
  presets: [],
  hidden_profile: "",
  theme: "system",
  keep: false,
});

const NUM_LIKELIEST = 5;
const NUMBERS = {
  temperature: { low: 0, high: 2, whole: false },
  top_p: { low: 0, high: 1, whole: false },
  max_tokens: { low: 1, high: 2 ** 31 - 1, whole: true },
  seed: { low: Number.MIN_SAFE_INTEGER, high: Number.MAX_SAFE_INTEGER, whole: true },
};

/** Returns what is wrong with a setting, in a sentence, or an empty text. */
export function faultOf(name, value) {
  const text = String(value).trim();
  if (name === "more" && text) return isObject(parseJson(text)) ? "" : "Give a JSON object, such as {\"top_k\": 20}.";
  if (name === "tools" && text) return faultOfTools(text);
  if (name === "schema" && text) return parseJson(text) === undefined ? "This is not valid JSON." : "";
  const rule = NUMBERS[name];
  if (!rule || !text) return "";
  const number = Number(text);
  if (!Number.isFinite(number) || (rule.whole && !Number.isInteger(number))) return rule.whole ? "Give a whole number." : "Give a number.";
  if (number < rule.low || number > rule.high) return `Give a number from ${rule.low} to ${rule.high}.`;
  return "";
}

/** Returns the fields of a request that the settings ask for: what is empty is left to the server, what is wrong is left out. */
export function fieldsOf(settings) {
  const fields = {};
  for (const name of Object.keys(NUMBERS)) {
    if (settings[name].trim() && !faultOf(name, settings[name])) fields[name] = Number(settings[name]);
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  const tools = settings.tools.trim() && !faultOf("tools", settings.tools) ? toolList(settings.tools) : [];
  if (tools.length) Object.assign(fields, { tools, tool_choice: settings.tool_choice });
  const format = formatOf(settings);
  if (format) fields.response_format = format;
  if (settings.likelihoods) Object.assign(fields, { logprobs: true, top_logprobs: NUM_LIKELIEST });
  const more = parseJson(settings.more);
  return isObject(more) ? { ...fields, ...more } : fields;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function formatOf({ format, schema }) {
  if (format === "json_object") return { type: "json_object" };
  const parsed = parseJson(schema);
  return format === "json_schema" && parsed !== undefined ? { type: "json_schema", json_schema: { name: "answer", schema: parsed } } : null;
}

function faultOfTools(text) {
  const parsed = parseJson(text);
  if (parsed === undefined) return "This is not valid JSON.";
  const named = toolList(text).every((tool) => typeof tool?.function?.name === "string");
  return named ? "" : "Each tool needs a function with a name.";
}

/** Tools as a list: one alone may be given without brackets, and a function without its wrapping. */
function toolList(text) {
  const parsed = parseJson(text);
  return [parsed].flat().map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
}

/** Returns what JSON text stands for, or undefined when it is none. */
export function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
