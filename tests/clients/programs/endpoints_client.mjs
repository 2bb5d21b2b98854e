// What the openai package of Node has besides answers to chats: `node endpoints_client.mjs URL SLOW_URL FOLDER POOLING_URL`.
import { given, openaiClients, require, run } from "./scenarios.mjs";

const { client } = openaiClients();
const pooling = new (require("openai").default)({ baseURL: `${process.argv[5]}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: "tools", temperature: 0, max_output_tokens: given.parameters.max_tokens };
const question = given.first[0].content;
const endless = { ...asked, max_output_tokens: given.endless.max_tokens, logit_bias: given.endless.logit_bias };
const texts = ["the fox runs", "paris is the capital of france"];

async function ended(response) {
  while (response.status === "queued" || response.status === "in_progress") {
    await new Promise((resolve) => setTimeout(resolve, 20));
    response = await client.responses.retrieve(response.id);
  }
  return response;
}

const scenarios = {
  async background() {
    const started = await client.responses.create({ ...asked, input: question, background: true });
    const response = await ended(started);
    return { text: response.output_text, status: response.status };
  },
  async background_stream() {
    let id, last, text = "";
    const add = (event) => {
      last = event.sequence_number;
      if (event.type === "response.output_text.delta") text += event.delta;
    };
    for await (const event of await client.responses.create({ ...asked, input: question, background: true, stream: true })) {
      id ??= event.response.id;
      add(event);
      if (event.type === "response.output_text.delta") break;
    }
    for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: last })) add(event);
    return { text };
  },
  async cancelled() {
    const started = await client.responses.create({ ...endless, input: question, background: true });
    const response = await client.responses.cancel(started.id);
    return { status: response.status, again: (await client.responses.cancel(started.id)).status };
  },
  async input_items() {
    const response = await client.responses.create({ ...asked, input: [...given.first, { role: "assistant", content: "12" }, given.second] });
    const found = [];
    for await (const item of client.responses.inputItems.list(response.id, { order: "asc", limit: 1 })) found.push(item.content[0].text);
    const counted = await client.responses.inputTokens.count({ model: "tools", input: question });
    await client.responses.delete(response.id);
    return { texts: found, tokens: counted.input_tokens };
  },
  async conversation() {
    const conversation = await client.conversations.create({ metadata: { topic: "sums" } });
    const first = await client.responses.create({ ...asked, input: question, conversation: conversation.id });
    const second = await client.responses.create({ ...asked, input: given.second.content, conversation: { id: conversation.id } });
    const found = [];
    for await (const item of client.conversations.items.list(conversation.id, { order: "asc", limit: 3 })) found.push(item.content[0].text);
    const { deleted } = await client.conversations.delete(conversation.id);
    return { text: second.output_text, first: first.output_text, texts: found, deleted };
  },
  async embeddings() {
    const base64 = await pooling.embeddings.create({ model: "tools", input: texts });
    const floats = await pooling.embeddings.create({ model: "tools", input: texts, encoding_format: "float" });
    return { base64: base64.data.map((each) => [...each.embedding]), float: floats.data.map((each) => each.embedding) };
  },
  async refused() {
    const key = { headers: { "Idempotency-Key": `key of ${Date.now()}` } };
    await client.responses.create({ ...asked, input: question }, key);
    try {
      await client.responses.create({ ...asked, input: "other" }, { ...key, maxRetries: 2 });
    } catch (error) {
      return { class: error.constructor.name, status: error.status, param: error.param };
    }
  },
};

await run({ "openai (Node)": scenarios });
