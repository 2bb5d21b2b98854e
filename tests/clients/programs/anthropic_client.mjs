// Anthropic's package of Node: `node anthropic_client.mjs URL SLOW_URL PACKAGES`. Messages go back as the package hands them out.
import { ended, given, require, run, slowUrl, url } from "./scenarios.mjs";

const Anthropic = require("@anthropic-ai/sdk").default;

const open = (base) => new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
const client = open(url), slow = open(slowUrl);
const asked = { model: "tools", ...given.parameters };
const { name, description, strict, parameters } = given.tool.function;
const weather = { name, description, strict, input_schema: parameters };
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");

const scenarios = {
  async streamed() {
    const stream = client.messages.stream({ ...asked, messages: given.first });
    let text = "";
    stream.on("text", (piece) => { text += piece; });
    const message = await stream.finalMessage();
    const { input_tokens, cache_read_input_tokens, output_tokens } = message.usage;
    return { text, usage: [input_tokens + cache_read_input_tokens, output_tokens] };
  },
  async second_turn() {
    const message = await client.messages.create({ ...asked, messages: given.first });
    const answered = { role: "assistant", content: message.content };
    return { text: textOf(await client.messages.create({ ...asked, messages: [...given.first, answered, given.second] })) };
  },
  async tool_loop() {
    const { logit_bias } = given.forced;
    const tool_choice = { type: "any", disable_parallel_tool_use: true };
    const stream = client.messages.stream({ ...asked, messages: given.cities, tools: [weather], tool_choice, logit_bias });
    let args = "";
    stream.on("inputJson", (piece) => { args += piece; });
    const message = await stream.finalMessage();
    const call = message.content[0];
    const content = [{ type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: given.result }] }];
    const messages = [...given.cities, { role: "assistant", content: message.content }, { role: "user", content }];
    return { arguments: args, text: textOf(await client.messages.create({ ...asked, messages, tools: [weather] })) };
  },
  async streamed_error() {
    await slow.messages.stream({ ...asked, ...given.endless, messages: given.first }).finalMessage();
    return ended;
  },
  async refused() {
    try {
      await client.messages.create({ ...asked, model: "other", messages: given.first });
    } catch (error) {
      return { class: error.constructor.name, type: error.type, id: error.requestID };
    }
  },
  async counted() {
    return { tokens: (await client.messages.countTokens({ model: "tools", messages: given.first })).input_tokens };
  },
};

await run({ "anthropic (Node)": scenarios });
