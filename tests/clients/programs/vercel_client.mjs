// The AI SDK of Vercel, over two of its providers: `node vercel_client.mjs URL SLOW_URL FOLDER`, with the packages in FOLDER.
import { ended, given, require, run, slowUrl, url } from "./scenarios.mjs";

const { Output, generateText, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const providers = {
  "openai": (base) => createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" }).chat("tools"),
  "openai-compatible": (base) => createOpenAICompatible({
    name: "quire", baseURL: `${base}/v1`, includeUsage: true, supportsStructuredOutputs: true,
  })("tools"),
};
const settings = { temperature: 0, maxOutputTokens: given.parameters.max_tokens, maxRetries: 0, onError() {} };
const biased = (bias) => ({
  providerOptions: { openai: { logitBias: bias, parallelToolCalls: false }, quire: { logit_bias: bias, parallel_tool_calls: false } },
});
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async () => given.result,
});
const form = { output: Output.object({ schema: z.object({ total: z.union([z.literal(12), z.literal(7)]) }) }) };

const scenarios = (model, slow) => ({
  async streamed() {
    const result = streamText({ ...settings, model, messages: given.first });
    const [text, usage] = [await result.text, await result.usage];
    return { text, usage: [usage.inputTokens, usage.outputTokens] };
  },
  async second_turn() {
    const first = await generateText({ ...settings, model, messages: given.first });
    const messages = [...given.first, ...first.response.messages, given.second];
    return { text: (await generateText({ ...settings, model, messages })).text };
  },
  async tool_loop() {
    const asked = { ...settings, ...form, model, tools: { weather } };
    const first = await generateText({
      ...asked, messages: given.cities, toolChoice: "required", ...biased(given.forced.logit_bias),
    });
    const last = await generateText({ ...asked, messages: [...given.cities, ...first.response.messages] });
    return { arguments: JSON.stringify(first.toolCalls[0].input), text: last.text, total: last.output.total };
  },
  async streamed_error() {
    const endless = { maxOutputTokens: given.endless.max_tokens, ...biased(given.endless.logit_bias) };
    for await (const part of streamText({ ...settings, ...endless, model: slow, messages: given.first }).fullStream) {
      if (part.type === "error") throw new Error(part.error.message ?? JSON.stringify(part.error));
    }
    return ended;
  },
});

await run(Object.fromEntries(
  Object.entries(providers).map(([name, open]) => [name, scenarios(open(url), open(slowUrl))]),
));
