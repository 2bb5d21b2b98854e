// The answers that are being read: each into the last message of its conversation, until it ends or is stopped.

import { answer, call } from "./sse.js";
import { randomId } from "./storage.js";

const TAB = "quire.tab";
const SAVE_EVERY = 300; // milliseconds

/**
 * `session` has the API key. `on` has what is called: `changed(conversation)` for what came, `ended(conversation)`,
 * `paused(conversation, why)`, and `save(conversation)` now and then.
 */
export class Answers {
  constructor(session, on) {
    this.session = session;
    this.on = on;
    this.running = new Map(); // an AbortController by the conversation's id
    this.tab = sessionStorage.getItem(TAB) ?? randomId();
    sessionStorage.setItem(TAB, this.tab);
  }

  isRunning(conversation) {
    return this.running.has(conversation.id);
  }

  /** Whether an answer was being read here when the page was reloaded. */
  isOwn(conversation) {
    return conversation.pending?.tab === this.tab;
  }

  /** Sends a request, whose answer is the conversation's last message. */
  begin(conversation, body) {
    conversation.pending = { key: randomId(), body, id: "", after: "", message: conversation.leaf };
    this.read(conversation);
  }

  /** Reads the pending answer to its end. */
  async read(conversation) {
    const { pending } = conversation;
    const message = conversation.message(pending.message);
    const controller = new AbortController();
    this.running.set(conversation.id, controller);
    pending.tab = this.tab;
    const began = performance.now();
    const resumed = Boolean(pending.after);
    const passed = () => (performance.now() - began) / 1000;
    let timer = null;
    try {
      const options = {
        key: this.session.key,
        signal: controller.signal,
        onPause: (why) => this.on.paused(conversation, why),
        onHeaders: (headers) => (message.ignored = list(headers.get("x-quire-ignored-parameters")) ?? message.ignored),
        onComment: (text) => text.startsWith("engine ") && (message.moves ??= []).push(text),
      };
      for await (const chunk of answer(pending, options)) {
        apply(message, chunk);
        if (!resumed) message.seconds = passed();
        if (!resumed && hasOutput(chunk)) message.first ??= message.seconds;
        this.on.changed(conversation);
        timer ??= setTimeout(() => {
          timer = null;
          this.on.save(conversation);
        }, SAVE_EVERY);
      }
    } catch (error) {
      if (error.status === 401) this.session.refused(error.message);
      if (error.name === "AbortError" || error.code === "cancelled") message.finish = "abort";
      else message.error = error.message;
    }
    clearTimeout(timer);
    conversation.pending = null;
    conversation.updated = Date.now();
    this.running.delete(conversation.id);
    this.on.ended(conversation);
  }

  /** Stops an answer, on its engine too. */
  async stop(conversation) {
    const { pending } = conversation;
    const controller = this.running.get(conversation.id);
    if (!pending || !controller) return;
    try {
      if (!pending.id) controller.abort();
      else await call(`v1/requests/${encodeURIComponent(pending.id)}/cancel`, { key: this.session.key, method: "POST" });
    } catch {
      controller.abort(); // the router does not know it any more, or cannot be reached
    }
  }
}

const list = (header) => header?.split(",").map((name) => name.trim());

const hasOutput = ({ choices }) => Boolean(choices?.[0]?.delta && Object.entries(choices[0].delta).some(([name, value]) => name !== "role" && value));

/** Adds what a chunk brings to the message. */
function apply(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  message.content += content ?? "";
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const part of calls ?? []) addCall((message.tool_calls ??= []), part);
  if (choice.logprobs?.content?.length && message.tokens !== null) {
    const tokens = choice.logprobs.content.map((each) => [
      each.token,
      each.logprob,
      each.top_logprobs.map((top) => [top.token, top.logprob]),
      each.bytes ?? [],
    ]);
    (message.tokens ??= []).push(...tokens);
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function addCall(calls, part) {
  const known = (calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  known.id ||= part.id ?? "";
  known.function.name += part.function?.name ?? "";
  known.function.arguments += part.function?.arguments ?? "";
}
