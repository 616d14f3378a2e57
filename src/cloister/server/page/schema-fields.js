// JSON schemas that a form can show: an object of plain fields. Pure.

const TYPES = {
  text: { type: "string" },
  number: { type: "number" },
  whole: { type: "integer" },
  truth: { type: "boolean" },
  texts: { type: "array", items: { type: "string" } },
};

/** Kinds of fields, for people. `choice` is one of a few texts. */
export const KINDS = { text: "Text", number: "Number", whole: "Whole number", truth: "Yes or no", texts: "List of texts", choice: "One of…" };

/** Returns the fields of a schema: name, kind, and the texts of a choice; or null when it says more than the form can show. */
export function fieldsOfSchema(text) {
  if (!text.trim()) return [];
  try {
    const schema = JSON.parse(text);
    const fields = Object.entries(schema.properties ?? {}).map(([name, property]) => ({ name, ...kindOf(property) }));
    return JSON.stringify(JSON.parse(schemaOfFields(fields))) === JSON.stringify(schema) ? fields : null;
  } catch {
    return null;
  }
}

/** Returns the schema of an object that has exactly these fields, as text. Fields without a name are left out. */
export function schemaOfFields(fields) {
  const named = fields.filter(({ name }) => name.trim());
  if (!named.length) return "";
  const properties = Object.fromEntries(named.map((field) => [field.name.trim(), propertyOf(field)]));
  return JSON.stringify({ type: "object", properties, required: Object.keys(properties), additionalProperties: false }, null, 2);
}

function propertyOf({ kind, choices }) {
  return kind === "choice" ? { type: "string", enum: choices } : TYPES[kind];
}

function kindOf(property) {
  if (property.enum) return { kind: "choice", choices: property.enum };
  const found = Object.keys(TYPES).find((kind) => JSON.stringify(TYPES[kind]) === JSON.stringify(property));
  if (!found) throw new TypeError("a property that the form cannot show");
  return { kind: found, choices: [] };
}
