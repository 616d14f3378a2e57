// The official npm SDK of OpenAI: `npm install openai zod`, then `node openai_node.mjs http://127.0.0.1:8000`.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { expect, question, runChecks, untilIdle, url } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: question }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 12 }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
};
const Answer = z.object({ title: z.string().max(12), score: z.number().int(), tags: z.array(z.enum(["a", "b"])).max(3) });

await runChecks("openai npm", {
  chat: async () => {
    const reply = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
    expect(reply.choices[0].message.content, "content");
    return `${reply.usage.completion_tokens} tokens`;
  },
  stream: async () => {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
    expect(text === whole.choices[0].message.content, "the stream is the text");
    return "the same text as at once";
  },
  logprobs: async () => {
    const reply = await client.chat.completions.create({ model, messages, max_tokens: 4, logprobs: true, top_logprobs: 2 });
    expect(reply.choices[0].logprobs.content.every((entry) => entry.top_logprobs.length === 2), "2 alternatives");
    return "2 alternatives at each position";
  },
  "tool, required": async () => {
    const reply = await client.chat.completions.create({ model, messages, tools: [weather], tool_choice: "required", max_tokens: 120 });
    const call = reply.choices[0].message.tool_calls[0];
    expect("city" in JSON.parse(call.function.arguments), "arguments");
    return `calls ${call.function.name}`;
  },
  "tools run by the helper, streamed": async () => {
    let numCalls = 0;
    const runner = client.chat.completions.runTools(
      {
        model, messages, max_tokens: 120, stream: true, tool_choice: { type: "function", function: { name: "get_weather" } },
        tools: [{ type: "function", function: { ...weather.function, parse: JSON.parse, function: () => { numCalls += 1; return "rain"; } } }],
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    expect(numCalls >= 1, "the function was called");
    return `${numCalls} call`;
  },
  "structured output": async () => {
    const reply = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Answer, "answer"), max_tokens: 200 });
    expect(Answer.safeParse(reply.choices[0].message.parsed).success, "a zod object");
    return "a zod object";
  },
  responses: async () => {
    const reply = await client.responses.create({ model, input: question, max_output_tokens: 16, store: false });
    expect(reply.output_text.length > 0, "text");
    return reply.status;
  },
  "responses, streamed": async () => {
    const kinds = [];
    for await (const event of await client.responses.create({ model, input: question, max_output_tokens: 16, stream: true })) kinds.push(event.type);
    return `${kinds.length} events from ${kinds[0]} to ${kinds.at(-1)}`;
  },
  embeddings: async () => {
    const reply = await client.embeddings.create({ model, input: ["one", "two"] });
    expect(reply.data.length === 2, "two vectors");
    return `${reply.data[0].embedding.length} dimensions`;
  },
  errors: async () => {
    try {
      await client.chat.completions.create({ model: "no-such-model", messages });
    } catch (error) {
      expect(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", "404 model_not_found");
      return `${error.status} ${error.code}`;
    }
    throw new Error("an unknown model was taken");
  },
  cancel: async () => {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 4000, stream: true, ignore_eos: true });
    for await (const _ of stream) break;
    stream.controller.abort();
    return untilIdle();
  },
});
