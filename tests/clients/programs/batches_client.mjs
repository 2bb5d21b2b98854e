// The openai package of Node on files and batches: `node batches_client.mjs URL FOLDER`, with the package in FOLDER.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, packages] = process.argv.slice(2);
const given = JSON.parse(readFileSync(new URL("./scenarios.json", import.meta.url)));
const require = createRequire(pathToFileURL(`${packages}/`));
const { default: OpenAI, toFile } = require("openai");

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const body = { model: "tools", messages: given.first, ...given.parameters };
const lines = ["one", "two"].map((name) => ({ custom_id: name, method: "POST", url: "/v1/chat/completions", body }));
const content = lines.map((line) => JSON.stringify(line)).join("\n");

const file = await client.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
const settings = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
let batch = await client.batches.create(settings);
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 100));
  batch = await client.batches.retrieve(batch.id);
}
const output = await (await client.files.content(batch.output_file_id)).text();
const files = [], batches = [];
for await (const each of client.files.list({ limit: 1 })) files.push(each.id);
for await (const each of client.batches.list({ limit: 1 })) batches.push(each.id);
console.log(JSON.stringify({
  status: batch.status,
  texts: output.trim().split("\n").map((line) => JSON.parse(line).response.body.choices[0].message.content),
  files: [files.includes(file.id), files.includes(batch.output_file_id)],
  batches: batches.includes(batch.id),
  same: (await (await client.files.content(file.id)).text()) === content,
  deleted: (await client.files.delete(file.id)).deleted,
}));
