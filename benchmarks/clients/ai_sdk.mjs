// The AI SDK: `npm install ai @ai-sdk/openai @ai-sdk/openai-compatible zod`, then `node ai_sdk.mjs http://127.0.0.1:8000`.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { expect, question, runChecks, untilIdle, url } from "./checks.mjs";

const compatible = createOpenAICompatible({ name: "cloister", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const name = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const model = compatible.chatModel(name);
const options = { model, prompt: question, maxRetries: 0 };
const schema = z.object({ title: z.string().max(12), score: z.number().int() });
const weather = () => {
  let numCalls = 0;
  const it = tool({
    description: "Says the weather.",
    inputSchema: z.object({ city: z.string().max(12) }),
    execute: async () => { numCalls += 1; return "rain"; },
  });
  return { it, count: () => numCalls };
};

await runChecks("AI SDK", {
  generateText: async () => {
    const reply = await generateText({ ...options, maxOutputTokens: 16 });
    return `${reply.usage.outputTokens} tokens, ${reply.finishReason}`;
  },
  streamText: async () => {
    const reply = streamText({ ...options, maxOutputTokens: 16 });
    let text = "";
    for await (const piece of reply.textStream) text += piece;
    expect(text.length > 0, "text");
    return `${text.length} characters`;
  },
  "tool, required": async () => {
    const made = weather();
    await generateText({ ...options, tools: { weather: made.it }, toolChoice: "required", maxOutputTokens: 120, stopWhen: stepCountIs(1) });
    expect(made.count() >= 1, "the tool ran");
    return `${made.count()} call`;
  },
  "tool, streamed": async () => {
    const made = weather();
    const reply = streamText({ ...options, tools: { weather: made.it }, toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 120, stopWhen: stepCountIs(1) });
    for await (const _ of reply.fullStream);
    expect(made.count() >= 1, "the tool ran");
    return `${made.count()} call`;
  },
  "structured output": async () => {
    const reply = await generateText({ ...options, output: Output.object({ schema }), maxOutputTokens: 200 });
    expect(schema.safeParse(reply.output).success, "a zod object");
    return "a zod object";
  },
  "structured output, streamed": async () => {
    const reply = streamText({ ...options, output: Output.object({ schema }), maxOutputTokens: 200 });
    let numParts = 0;
    for await (const _ of reply.partialOutputStream) numParts += 1;
    expect(schema.safeParse(await reply.output).success, "a zod object");
    return `${numParts} partial objects`;
  },
  responses: async () => {
    const reply = await generateText({ ...options, model: openai.responses(name), maxOutputTokens: 16 });
    expect(reply.text.length > 0, "text");
    return `${reply.usage.outputTokens} tokens`;
  },
  "responses, streamed": async () => {
    const reply = streamText({ ...options, model: openai.responses(name), maxOutputTokens: 16 });
    let text = "";
    for await (const piece of reply.textStream) text += piece;
    expect(text.length > 0, "text");
    return `${text.length} characters`;
  },
  embedMany: async () => {
    const reply = await embedMany({ model: compatible.embeddingModel(name), values: ["one", "two"], maxRetries: 0 });
    return `${reply.embeddings.length} vectors of ${reply.embeddings[0].length}`;
  },
  errors: async () => {
    try {
      await generateText({ ...options, model: compatible.chatModel("no-such-model") });
    } catch (error) {
      expect(error.statusCode === 404, `404, not ${error.statusCode}`);
      return `${error.statusCode}`;
    }
    throw new Error("an unknown model was taken");
  },
  cancel: async () => {
    const leave = new AbortController();
    const reply = streamText({ ...options, maxOutputTokens: 4000, abortSignal: leave.signal, onError: () => {} });
    for await (const _ of reply.textStream) { leave.abort(); break; }
    return untilIdle();
  },
});
