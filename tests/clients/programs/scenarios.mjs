// What the programs in JavaScript share: `node PROGRAM URL SLOW_URL FOLDER`, with the packages in FOLDER.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

export const [url, slowUrl, packages] = process.argv.slice(2);
export const given = JSON.parse(readFileSync(new URL("./scenarios.json", import.meta.url)));
export const require = createRequire(pathToFileURL(`${packages}/`));
export const ended = { text: "the stream ended without an error" };

// Prints what each scenario of each client gave, or the error that it raised, as one JSON object.
export async function run(clients) {
  const found = {};
  for (const [name, scenarios] of Object.entries(clients)) {
    found[name] = {};
    for (const [scenario, act] of Object.entries(scenarios)) {
      try {
        found[name][scenario] = await act();
      } catch (error) {
        found[name][scenario] = { error: `${error.name}: ${error.message}` };
      }
    }
  }
  console.log(JSON.stringify(found));
  process.exit(0);
}

// The openai package, for both routers.
export function openaiClients() {
  const OpenAI = require("openai").default;
  const open = (base) => new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
  return { client: open(url), slow: open(slowUrl) };
}

// And openai-agents, whose agents speak through one of its models.
export function openaiPackages() {
  const agents = require("@openai/agents");
  const { z } = require("zod");
  agents.setTracingDisabled(true);
  const weather = agents.tool({
    name: "weather",
    description: "The weather in a city.",
    parameters: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: async () => given.result,
  });
  const agentOf = (Model) => (made, settings = {}, more = {}) =>
    new agents.Agent({
      name: "tester",
      model: new Model(made, "tools"),
      modelSettings: { temperature: 0, maxTokens: given.parameters.max_tokens, ...settings },
      ...more,
    });
  return { ...openaiClients(), agents, weather, agentOf };
}
