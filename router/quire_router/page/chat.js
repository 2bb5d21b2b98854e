// The playground: a conversation that is kept for this tab. An answer that a reload interrupted goes on where it was.

import { MessageView } from "./messages.js";
import { SettingError } from "./settings.js";
import { answer, call } from "./sse.js";
import { keep } from "./storage.js";

const STORED = "quire.chat";
const SAVE_EVERY = 300; // milliseconds
const EMPTY = { messages: [], pending: null };

export class Chat {
  /** `session` has the API key, and `refused()` is called when the router does not take it. */
  constructor(session, settings) {
    this.session = session;
    this.settings = settings;
    for (const id of ["log", "status", "composer", "message", "send", "stop", "clear"]) this[id] = document.getElementById(id);
    this.state = JSON.parse(sessionStorage.getItem(STORED)) ?? structuredClone(EMPTY);
    this.views = [];
    this.controller = null;
    this.state.messages.forEach((message) => this.show(message));
    this.listen();
  }

  listen() {
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      const content = this.message.value;
      if (content.trim() && this.ask([{ role: "user", content }])) this.message.value = "";
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.composer.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.cancel());
    this.clear.addEventListener("click", () => this.startOver());
    addEventListener("pagehide", () => this.save());
  }

  /** Goes on with the answer that a reload interrupted, if there is one. */
  resume() {
    if (this.state.pending && !this.controller) this.read();
  }

  /** Sends some messages after those before. Returns false if that is not possible now. */
  ask(messages) {
    if (this.controller) return false;
    let fields;
    try {
      fields = this.settings.request();
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.settings.root.open = true;
      error.field.focus();
      this.status.textContent = error.message;
      return false;
    }
    const before = this.state.messages.filter((message) => !message.error || message.content);
    const sent = [...this.settings.system(), ...[...before, ...messages].map(asRequest)];
    this.state.pending = { key: crypto.randomUUID?.() ?? randomKey(), body: { ...fields, messages: sent }, id: "", after: "" };
    for (const message of [...messages, { role: "assistant", content: "" }]) {
      this.state.messages.push(message);
      this.show(message);
    }
    this.log.scrollTop = this.log.scrollHeight;
    this.read();
    return true;
  }

  show(message) {
    const view = new MessageView(message, (results) => this.sendResults(message, results));
    this.views.push(view);
    this.log.append(view.node);
  }

  sendResults(message, results) {
    const messages = results.map((content, index) => ({ role: "tool", tool_call_id: message.tool_calls[index].id, content }));
    if (!this.ask(messages)) return false;
    message.answered = true;
    return true;
  }

  /** Reads the pending answer to its end. */
  async read() {
    const { pending, messages } = this.state;
    const [message, view] = [messages.at(-1), this.views.at(-1)];
    this.controller = new AbortController();
    const began = performance.now();
    const resumed = Boolean(pending.after);
    this.busy(true);
    view.update(false);
    try {
      const options = { key: this.session.key, signal: this.controller.signal, onPause: (text) => (this.status.textContent = text) };
      for await (const chunk of answer(pending, options)) {
        apply(message, chunk);
        this.draw(view, message);
      }
      if (!resumed) message.seconds = (performance.now() - began) / 1000;
    } catch (error) {
      if (error.status === 401) this.session.refused(error.message);
      if (error.name === "AbortError" || error.code === "cancelled") message.finish = "abort";
      else message.error = error.message;
    }
    this.state.pending = null;
    this.controller = null;
    this.busy(false);
    view.update(true);
    this.follow();
    this.save();
  }

  /** Draws what came, once a frame, and saves it now and then. */
  draw(view) {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.controller) view.update(false);
      this.follow();
    });
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.save();
    }, SAVE_EVERY);
  }

  follow() {
    const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (below < 120) this.log.scrollTop = this.log.scrollHeight;
  }

  async cancel() {
    const { pending } = this.state;
    const controller = this.controller;
    if (!pending || !controller) return;
    this.stop.disabled = true;
    try {
      if (!pending.id) controller.abort();
      else await call(`v1/requests/${encodeURIComponent(pending.id)}/cancel`, { key: this.session.key, method: "POST" });
    } catch {
      controller.abort(); // the router does not know it any more, or cannot be reached
    }
  }

  startOver() {
    this.cancel();
    this.controller?.abort();
    this.state = structuredClone(EMPTY);
    this.views = [];
    this.log.replaceChildren();
    this.status.textContent = "";
    this.save();
    this.message.focus();
  }

  busy(now) {
    this.send.disabled = now;
    this.stop.hidden = !now;
    this.stop.disabled = false;
    this.status.textContent = now ? "The model answers." : "";
  }

  /**
   * Stores the text and the position behind it together, so that a reload neither repeats nor skips a token. Where that
   * is too large, log-probabilities are left out of what is stored, and stay in what is shown.
   */
  save() {
    const smaller = () => ({ ...this.state, messages: this.state.messages.map(withoutTokens) });
    if (keep(STORED, JSON.stringify(this.state)) || keep(STORED, JSON.stringify(smaller()))) return;
    this.status.textContent = "This conversation is too long to survive a reload.";
  }
}

/** A copy whose `tokens` are null, if it has any: those that come after a reload alone would be a part of its text. */
function withoutTokens(message) {
  return message.tokens ? { ...message, tokens: null } : message;
}

/** A message as a request has it. */
function asRequest({ role, content, tool_calls, tool_call_id }) {
  const calls = tool_calls?.length ? { tool_calls } : {};
  return { role, content, ...calls, ...(tool_call_id ? { tool_call_id } : {}) };
}

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

/** As `crypto.randomUUID`, which browsers have on https and localhost only. */
function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
