// The openai package and openai-agents of Node: `node node_clients.mjs URL SLOW_URL FOLDER`, with the packages in FOLDER.
import { ended, given, openaiPackages, run } from "./scenarios.mjs";

const { client, slow, agents, weather, agentOf } = openaiPackages();

const asked = { model: "tools", ...given.parameters };
const first = given.first[0].content;

const openaiScenarios = {
  async streamed() {
    let text = "", usage;
    for await (const chunk of await client.chat.completions.create({
      ...asked, messages: given.first, stream: true, stream_options: { include_usage: true },
    })) {
      usage = chunk.usage ?? usage;
      text += chunk.choices.map((choice) => choice.delta.content ?? "").join("");
    }
    return { text, usage: [usage.prompt_tokens, usage.completion_tokens] };
  },
  async second_turn() {
    const message = await client.chat.completions.stream({ ...asked, messages: given.first }).finalMessage();
    const answer = await client.chat.completions.create({ ...asked, messages: [...given.first, message, given.second] });
    return { text: answer.choices[0].message.content };
  },
  async tool_loop() {
    const answer = await client.chat.completions.parse({
      ...asked, messages: given.cities, tools: [given.tool], ...given.forced,
    });
    const message = answer.choices[0].message;
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: given.result };
    const last = await client.chat.completions.create({
      ...asked, messages: [...given.cities, message, result], tools: [given.tool],
    });
    return { arguments: message.tool_calls[0].function.arguments, text: last.choices[0].message.content };
  },
  async streamed_error() {
    for await (const _ of await slow.chat.completions.create({
      ...asked, ...given.endless, messages: given.first, stream: true,
    }));
    return ended;
  },
};

const agent = agentOf(agents.OpenAIChatCompletionsModel);
const agentScenarios = {
  async streamed() {
    const result = await agents.run(agent(client), first, { stream: true });
    for await (const _ of result);
    const usage = result.state.usage;
    return { text: result.finalOutput, usage: [usage.inputTokens, usage.outputTokens] };
  },
  async second_turn() {
    const result = await agents.run(agent(client), first);
    const again = await agents.run(agent(client), [...result.history, given.second]);
    return { text: again.finalOutput };
  },
  async tool_loop() {
    const caller = agent(client, {
      toolChoice: "required", parallelToolCalls: false, providerData: { logit_bias: given.forced.logit_bias },
    }, { tools: [weather] });
    const result = await agents.run(caller, given.cities[0].content);
    const calls = result.newItems.filter((item) => item.type === "tool_call_item");
    return { arguments: calls[0].rawItem.arguments, text: result.finalOutput };
  },
  async streamed_error() {
    const settings = { maxTokens: given.endless.max_tokens, providerData: { logit_bias: given.endless.logit_bias } };
    const result = await agents.run(agent(slow, settings), first, { stream: true });
    for await (const _ of result);
    return ended;
  },
};

await run({ "openai-node": openaiScenarios, "openai-agents-js": agentScenarios });
