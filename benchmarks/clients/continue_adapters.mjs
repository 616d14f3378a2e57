// What the editor extension Continue asks servers through: `npm install @continuedev/openai-adapters`.
import { constructLlmApi } from "@continuedev/openai-adapters";
import { expect, question, runChecks, url } from "./checks.mjs";

const api = constructLlmApi({ provider: "openai", apiKey: "none", apiBase: `${url}/v1/` });
const model = (await api.list())[0].id;
const messages = [{ role: "user", content: question }];
const { signal } = new AbortController();
const tool = {
  type: "function",
  function: { name: "read_file", parameters: { type: "object", properties: { path: { type: "string", maxLength: 12 } }, required: ["path"], additionalProperties: false } },
};

await runChecks("continue", {
  chat: async () => {
    const reply = await api.chatCompletionNonStream({ model, messages, max_tokens: 16, temperature: 0, stream: false }, signal);
    expect(reply.choices[0].message.content, "content");
    return `${reply.usage.completion_tokens} tokens`;
  },
  stream: async () => {
    let [text, usage] = ["", null];
    for await (const chunk of api.chatCompletionStream({ model, messages, max_tokens: 16, temperature: 0, stream: true }, signal)) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    expect(text && usage.completion_tokens, "text and usage");
    return `${usage.completion_tokens} tokens`;
  },
  "tool, streamed": async () => {
    let [name, given] = ["", ""];
    const body = { model, messages, tools: [tool], tool_choice: "required", max_tokens: 64, temperature: 0, stream: true };
    for await (const chunk of api.chatCompletionStream(body, signal))
      for (const call of chunk.choices[0]?.delta?.tool_calls ?? []) {
        name += call.function?.name ?? "";
        given += call.function?.arguments ?? "";
      }
    expect(name === "read_file" && "path" in JSON.parse(given), `${name} ${given}`);
    return "a call put together from its deltas";
  },
  "autocomplete by a template": async () => {
    let text = "";
    const body = { model, prompt: "def add(a, b):\n    return", max_tokens: 8, temperature: 0, stop: ["\n\n"], stream: true };
    for await (const chunk of api.completionStream(body, signal)) text += chunk.choices[0]?.text ?? "";
    expect(text, "text");
    return `${text.length} characters`;
  },
  "FIM route": async () => {
    const reply = await fetch(`${url}/v1/fim/completions`, { method: "POST", body: "{}", headers: { "content-type": "application/json" } });
    const { error } = await reply.json();
    expect(reply.status === 404 && error.message.includes("suffix"), error?.message);
    return `404, and what to use in its place`;
  },
  embeddings: async () => {
    const reply = await api.embed({ model, input: ["one", "two"] });
    expect(reply.data.length === 2, "2 vectors");
    return `${reply.data.length} vectors of ${reply.data[0].embedding.length}`;
  },
  rerank: async () => {
    const reply = await api.rerank({ model, query: "dead tuples", documents: ["VACUUM removes dead tuples", "a cat"] });
    expect((reply.data ?? reply.results)?.length === 2, JSON.stringify(reply).slice(0, 200));
    return "2 documents";
  },
});
