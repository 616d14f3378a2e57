// Ollama's npm client: `npm install ollama`, then `node ollama_node.mjs http://127.0.0.1:8000`.
import { Ollama } from "ollama";
import { expect, question, runChecks, untilIdle, url } from "./checks.mjs";

const client = new Ollama({ host: url });
const model = (await client.list()).models[0].name;
const messages = [{ role: "user", content: question }];
const options = { temperature: 0, num_predict: 16 };

await runChecks("ollama npm", {
  chat: async () => {
    const reply = await client.chat({ model, messages, options });
    expect(reply.message.content, "content");
    return `${reply.eval_count} tokens`;
  },
  stream: async () => {
    let text = "";
    for await (const line of await client.chat({ model, messages, options, stream: true })) text += line.message.content;
    expect(text === (await client.chat({ model, messages, options })).message.content, "the stream is the text");
    return "the same text as at once";
  },
  generate: async () => `${(await client.generate({ model, prompt: "VACUUM is", raw: true, options })).eval_count} tokens`,
  structured: async () => {
    const format = { type: "object", properties: { score: { type: "integer" } }, required: ["score"], additionalProperties: false };
    const reply = await client.chat({ model, messages, format, options: { num_predict: 64 } });
    expect(Number.isInteger(JSON.parse(reply.message.content).score), "an integer");
    return reply.message.content;
  },
  embed: async () => `${(await client.embed({ model, input: ["one", "two"] })).embeddings[1].length} numbers`,
  show: async () => (await client.show({ model })).capabilities.join(" "),
  pull: async () => (await client.pull({ model })).status,
  error: async () => {
    const error = await client.chat({ model: "other", messages }).catch((error) => error);
    expect(error.status_code === 404 && error.error.includes("serves"), "a sentence");
    return error.error;
  },
  abort: async () => {
    const answer = await client.chat({ model, messages, options: { num_predict: 4000 }, stream: true });
    const gone = (async () => {
      for await (const line of answer) if (line.message.content) answer.abort();
    })().catch((error) => error);
    expect((await gone).name === "AbortError", "aborted");
    await untilIdle();
    return "no request runs";
  },
});
