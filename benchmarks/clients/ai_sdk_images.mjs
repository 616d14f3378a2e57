// Images through the AI SDK: `npm install ai @ai-sdk/openai @ai-sdk/openai-compatible`, then `node ai_sdk_images.mjs URL` with a
// server of a model that sees.
import { deflateSync, crc32 } from "node:zlib";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { expect, runChecks, untilIdle, url } from "./checks.mjs";

const compatible = createOpenAICompatible({ name: "cloister", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const name = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const model = compatible.chatModel(name);

function chunk(kind, data) {
  const body = Buffer.concat([Buffer.from(kind, "latin1"), data]);
  const ends = [Buffer.alloc(4), Buffer.alloc(4)];
  ends[0].writeUInt32BE(data.length);
  ends[1].writeUInt32BE(crc32(body));
  return Buffer.concat([ends[0], body, ends[1]]);
}

// A PNG of stripes in one colour.
function picture(red, green, blue, width = 70, height = 40) {
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 2, 0, 0, 0], 8);
  const rows = [];
  for (let y = 0; y < height; y++) {
    const row = Buffer.alloc(1 + 3 * width);
    for (let x = 0; x < width; x++) row.set((x >> 3) % 2 ? [red, green, blue] : [255, 255, 255], 1 + 3 * x);
    rows.push(row);
  }
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([signature, chunk("IHDR", head), chunk("IDAT", deflateSync(Buffer.concat(rows))), chunk("IEND", Buffer.alloc(0))]);
}

const ask = (...images) => ({
  maxRetries: 0,
  temperature: 0,
  maxOutputTokens: 8,
  messages: [{
    role: "user",
    content: [
      { type: "text", text: "What is that?" },
      ...images.map((image) => ({ type: "file", mediaType: "image/png", data: image })),
    ],
  }],
});
const red = picture(200, 20, 20), blue = picture(20, 20, 200);

await runChecks("AI SDK, images", {
  generateText: async () => {
    const replies = [];
    for (const images of [[red], [red], [blue], []]) replies.push(await generateText({ model, ...ask(...images) }));
    const texts = replies.map((reply) => reply.text);
    expect(texts[0] === texts[1], "the same image has the same answer");
    expect(new Set(texts).size === 3, "another image, or none, has another answer");
    const tokens = replies[0].usage.inputTokens - replies[3].usage.inputTokens;
    expect(tokens > 0, "the tokens of the image are counted");
    return `three answers to three prompts, ${tokens} tokens of an image`;
  },
  "several images": async () => {
    const reply = await generateText({ model, ...ask(red, blue, red) });
    return `${reply.usage.inputTokens} tokens`;
  },
  "as bytes": async () => {
    const [bytes, text] = [await generateText({ model, ...ask(new Uint8Array(red)) }), await generateText({ model, ...ask(red.toString("base64")) })];
    expect(bytes.text === text.text, "bytes and base64 are the same image");
    return "as base64";
  },
  streamText: async () => {
    const whole = await generateText({ model, ...ask(red) });
    const reply = streamText({ model, ...ask(red) });
    let text = "";
    for await (const piece of reply.textStream) text += piece;
    expect(text === whole.text, "streamed and whole are equal");
    return "as the whole answer";
  },
  responses: async () => {
    const reply = await generateText({ model: openai.responses(name), ...ask(red) });
    expect(reply.text === (await generateText({ model, ...ask(red) })).text, "as by chat completions");
    return "as by chat completions";
  },
  errors: async () => {
    for (const [what, image] of Object.entries({ "cut off": red.subarray(0, 90), "none of PNG": Buffer.from("no image") })) {
      try {
        await generateText({ model, ...ask(image) });
      } catch (error) {
        expect(error.statusCode === 400 && error.message.includes(what), `400 and ${what}, not ${error.statusCode}: ${error.message}`);
        continue;
      }
      throw new Error(`an image was taken that is ${what}`);
    }
    return "400, one line each";
  },
  cancel: async () => {
    const leave = new AbortController();
    const reply = streamText({ model, ...ask(red), maxOutputTokens: 200, abortSignal: leave.signal, onError: () => {} });
    for await (const _ of reply.textStream) { leave.abort(); break; }
    return untilIdle();
  },
});
