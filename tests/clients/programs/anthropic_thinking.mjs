// Thinking and the newest fields, as Anthropic's package of Node sends and reads them: `node anthropic_thinking.mjs URL - FOLDER`.
import { require, run, url } from "./scenarios.mjs";

const Anthropic = require("@anthropic-ai/sdk").default;
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const keep = { cache_control: { type: "ephemeral", ttl: "1h" } };
const asked = {
  model: "tiny", max_tokens: 50, system: [{ type: "text", text: "Be brief.", ...keep }], metadata: { user_id: "u" },
  messages: [{ role: "user", content: [{ type: "text", text: "hello", ...keep }] }],
};

await run({
  "anthropic (Node)": {
    async thinking() {
      const stream = client.messages.stream({ ...asked, thinking: { type: "adaptive", display: "summarized" } });
      let thinking = "";
      stream.on("thinking", (part) => { thinking += part; });
      const message = await stream.finalMessage();
      const again = [...asked.messages, { role: "assistant", content: message.content }, ...asked.messages];
      const second = await client.messages.create({ ...asked, messages: again, thinking: { type: "enabled", budget_tokens: 1024 } });
      const [first, text] = message.content;
      return { thinking, block: first, text: text.text, details: message.stop_details, types: second.content.map((block) => block.type) };
    },
    async beta() {
      const message = await client.beta.messages.create({
        ...asked, betas: ["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        context_management: { edits: [{ type: "clear_thinking_20251015", keep: "all" }] },
        output_config: { effort: "high", task_budget: { type: "tokens", total: 20000 } },
        thinking: { type: "enabled", budget_tokens: 1024, display: "updates" },
      });
      return { types: message.content.map((block) => block.type), reason: message.stop_reason };
    },
  },
});
