// The openai package, openai-agents and Vercel's AI SDK of Node on the Responses API, which the last two speak unless they
// are told otherwise: `node responses_client.mjs URL SLOW_URL FOLDER`, with the packages in FOLDER.
import { ended, given, openaiPackages, require, run, slowUrl, url } from "./scenarios.mjs";

const { client, slow, agents, weather, agentOf } = openaiPackages();
const { generateText, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

const asked = { model: "tools", temperature: 0, max_output_tokens: given.parameters.max_tokens };
const question = given.first[0].content, city = given.cities[0].content;
const tools = [{ type: "function", ...given.tool.function }];

const openaiScenarios = {
  async streamed() {
    let text = "", usage;
    for await (const event of await client.responses.create({ ...asked, input: question, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.completed") usage = event.response.usage;
    }
    return { text, usage: [usage.input_tokens, usage.output_tokens] };
  },
  async second_turn() {
    const first = await client.responses.stream({ ...asked, input: question }).finalResponse();
    const again = await client.responses.create({ ...asked, input: [...given.first, ...first.output, given.second] });
    const next = { ...asked, input: given.second.content, previous_response_id: first.id };
    const goneOn = await client.responses.create(next);
    if (again.output_text !== goneOn.output_text) throw new Error("the conversation is another");
    return { text: goneOn.output_text };
  },
  async tool_loop() {
    const first = await client.responses.create({ ...asked, input: city, tools, ...given.forced });
    const call = first.output[0];
    const result = { type: "function_call_output", call_id: call.call_id, output: given.result };
    const last = await client.responses.create({ ...asked, input: [result], tools, previous_response_id: first.id });
    return { arguments: call.arguments, text: last.output_text };
  },
  async streamed_error() {
    const endless = { ...asked, max_output_tokens: given.endless.max_tokens, logit_bias: given.endless.logit_bias };
    for await (const _ of await slow.responses.create({ ...endless, input: question, stream: true }));
    return ended;
  },
};

const agent = agentOf(agents.OpenAIResponsesModel);
const agentScenarios = {
  async streamed() {
    const result = await agents.run(agent(client), question, { stream: true });
    for await (const _ of result);
    const usage = result.state.usage;
    return { text: result.finalOutput, usage: [usage.inputTokens, usage.outputTokens] };
  },
  async second_turn() {
    const first = await agents.run(agent(client), question);
    const again = await agents.run(agent(client), [...first.history, given.second]);
    const goneOn = await agents.run(agent(client), given.second.content, { previousResponseId: first.lastResponseId });
    if (again.finalOutput !== goneOn.finalOutput) throw new Error("the conversation is another");
    return { text: goneOn.finalOutput };
  },
  async tool_loop() {
    const caller = agent(client, {
      toolChoice: "required", parallelToolCalls: false, providerData: { logit_bias: given.forced.logit_bias },
    }, { tools: [weather], toolUseBehavior: "stop_on_first_tool" });
    const first = await agents.run(caller, city);
    const calls = first.newItems.filter((item) => item.type === "tool_call_item");
    // Without the bias now: with it the small model would come to no end, and an answer that is cut is an error there.
    const last = await agents.run(agent(client, {}, { tools: [weather] }), first.history);
    return { arguments: calls[0].rawItem.arguments, text: last.finalOutput };
  },
  async streamed_error() {
    const settings = { maxTokens: given.endless.max_tokens, providerData: { logit_bias: given.endless.logit_bias } };
    const result = await agents.run(agent(slow, settings), question, { stream: true });
    for await (const _ of result);
    return ended;
  },
};

// Its provider has no name for a bias, which the small model needs to come to an end, or not to.
const biased = (bias) => (address, init) =>
  fetch(address, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), logit_bias: bias }) });
const vercel = (base, bias) =>
  createOpenAI({ baseURL: `${base}/v1`, apiKey: "none", ...(bias ? { fetch: biased(bias) } : {}) })("tools");
const settings = { temperature: 0, maxOutputTokens: given.parameters.max_tokens, maxRetries: 0, onError() {} };
const vercelTool = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async () => given.result,
});

const vercelScenarios = {
  async streamed() {
    const result = streamText({ ...settings, model: vercel(url), messages: given.first });
    const [text, usage] = [await result.text, await result.usage];
    return { text, usage: [usage.inputTokens, usage.outputTokens] };
  },
  async second_turn() {
    const first = await generateText({ ...settings, model: vercel(url), messages: given.first });
    const messages = [...given.first, ...first.response.messages, given.second];
    return { text: (await generateText({ ...settings, model: vercel(url), messages })).text };
  },
  async tool_loop() {
    const calling = { ...settings, tools: { weather: vercelTool } };
    const first = await generateText({
      ...calling, model: vercel(url, given.forced.logit_bias), messages: given.cities, toolChoice: "required",
      providerOptions: { openai: { parallelToolCalls: false } },
    });
    const last = await generateText({
      ...calling, model: vercel(url), messages: [...given.cities, ...first.response.messages],
    });
    return { arguments: JSON.stringify(first.toolCalls[0].input), text: last.text };
  },
  async streamed_error() {
    const model = vercel(slowUrl, given.endless.logit_bias);
    const asking = { ...settings, maxOutputTokens: given.endless.max_tokens, model, messages: given.first };
    for await (const part of streamText(asking).fullStream) {
      if (part.type === "error") throw new Error(part.error.message ?? JSON.stringify(part.error));
    }
    return ended;
  },
};

await run({ "openai-node": openaiScenarios, "openai-agents-js": agentScenarios, "vercel": vercelScenarios });
