// Presets: a system prompt and how answers are drawn, under a name. Pure.

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const SAMPLED = FIELDS.slice(1);

/** Presets that every page has. They leave the system prompt as it is. */
export const BUILT_IN = [
  { name: "Model default", temperature: "", top_p: "", max_tokens: "", seed: "" },
  { name: "Precise", temperature: "0", top_p: "", max_tokens: "", seed: "" },
  { name: "Balanced", temperature: "0.7", top_p: "0.95", max_tokens: "", seed: "" },
  { name: "Creative", temperature: "1.1", top_p: "0.98", max_tokens: "", seed: "" },
];

/** Returns the name of the preset that settings are equal to, one's own first, or an empty text. */
export function presetOf(settings) {
  const isEqual = (preset) => Object.entries(preset).every(([name, value]) => name === "name" || settings[name].trim() === value.trim());
  return [...settings.presets, ...BUILT_IN].find(isEqual)?.name ?? "";
}

/** Returns what a preset sets, by its name. */
export function valuesOf(settings, name) {
  const { name: _, ...values } = [...settings.presets, ...BUILT_IN].find((preset) => preset.name === name) ?? {};
  return values;
}

/** Returns one's own presets with the settings as they are now among them; one of the same name is replaced. */
export function withPreset(settings, name) {
  const values = Object.fromEntries(FIELDS.map((field) => [field, settings[field]]));
  return [...withoutPreset(settings, name), { name, ...values }];
}

/** Returns one's own presets without the one of that name. */
export function withoutPreset(settings, name) {
  return settings.presets.filter((preset) => preset.name !== name);
}

/** Returns how two settings differ in what an answer is drawn with, in words. */
export function describeChanges(settings, changes) {
  const names = { model: "model", top_p: "top p", max_tokens: "longest", seed: "seed", temperature: "temperature" };
  const changed = ["model", ...SAMPLED].filter((name) => name in changes && changes[name] !== settings[name]);
  return changed.map((name) => `${names[name]} ${changes[name] || "default"}`).join(", ") || "Same settings";
}
