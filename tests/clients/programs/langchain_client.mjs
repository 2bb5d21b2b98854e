// LangChain's ChatOpenAI in JavaScript: `node langchain_client.mjs URL SLOW_URL FOLDER`, with the packages in FOLDER.
import { ended, given, require, run, slowUrl, url } from "./scenarios.mjs";

const { ChatOpenAI } = require("@langchain/openai");
const { ToolMessage } = require("@langchain/core/messages");
const { z } = require("zod");

const { tool_choice, ...forced } = given.forced;
const open = (base, more = {}) => new ChatOpenAI({
  configuration: { baseURL: `${base}/v1` }, apiKey: "none", model: "tools", maxRetries: 0, streamUsage: true,
  temperature: 0, maxTokens: given.parameters.max_tokens, ...more,
});
const client = open(url);
const slow = open(slowUrl, { maxTokens: given.endless.max_tokens, modelKwargs: { logit_bias: given.endless.logit_bias } });

const scenarios = {
  async streamed() {
    let text = "", usage;
    for await (const chunk of await client.stream(given.first)) {
      text += chunk.text;
      usage = chunk.usage_metadata ?? usage;
    }
    return { text, usage: [usage.input_tokens, usage.output_tokens] };
  },
  async second_turn() {
    const message = await client.invoke(given.first);
    return { text: (await client.invoke([...given.first, message, given.second])).text };
  },
  async tool_loop() {
    const caller = open(url, { modelKwargs: { logit_bias: forced.logit_bias } });
    const message = await caller.bindTools([given.tool], { tool_choice, parallel_tool_calls: false }).invoke(given.cities);
    const [call] = message.tool_calls;
    const result = new ToolMessage({ content: given.result, tool_call_id: call.id });
    const last = await client.bindTools([given.tool]).invoke([...given.cities, message, result]);
    return { arguments: JSON.stringify(call.args), text: last.text };
  },
  async parsed_turn() {
    const form = z.object({ total: z.union([z.literal(12), z.literal(7)]) });
    return client.withStructuredOutput(form, { name: "sum", method: "jsonSchema" }).invoke(given.first);
  },
  async streamed_error() {
    for await (const _ of await slow.stream(given.first));
    return ended;
  },
};

await run({ "langchain (JavaScript)": scenarios });
