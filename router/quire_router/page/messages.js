// One message of the conversation on the page: its text, tokens in colours, reasoning, tool calls, and how it ended.

import { element, render } from "./markdown.js";

const WHO = { user: "You", assistant: "Model", tool: "Result of a tool" };
const REASONS = {
  length: "It ended at the most tokens.",
  abort: "Stopped.",
  tool_calls: "It asks for tools.",
  deadline: "It ended at its time limit.",
};
const SHADES = 8;

/** The shade of a token: 0 for a certain one, up to 7 for one of probability 1/128 or less. */
const shade = (logprob) => Math.min(SHADES - 1, Math.floor(-logprob / Math.LN2));
const percent = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;
const visible = (text) => text.replaceAll("\n", "⏎\n");
const CONTROL = /^<[|｜][^<>]*[|｜]>$|^<\/?s>$|^<(bos|eos|pad|start_of_turn|end_of_turn)>$/;
const SPACES = [9, 10, 13, 32];

/** Whether the bytes of a token are the next ones of `text` from `at` on, as far as that is there. */
const continues = (text, at, bytes) => bytes.every((byte, index) => at + index >= text.length || text[at + index] === byte);

/** Shows `message`. `onResults` is called with one result for each of its tool calls, in their order. */
export class MessageView {
  constructor(message, onResults) {
    this.message = message;
    this.onResults = onResults;
    this.thoughts = element("div");
    this.reasoning = element("details", { class: "reasoning", hidden: true }, element("summary", { textContent: "Reasoning" }), this.thoughts);
    this.text = element("div", { class: "text" });
    this.calls = element("div");
    this.end = element("p", { class: "end" });
    this.node = element(
      "article",
      { class: `message ${message.role}` },
      element("h2", { textContent: WHO[message.role] }),
      this.reasoning,
      this.text,
      this.calls,
      this.end,
    );
    this.update(true);
  }

  /** Shows what the message is now; `complete` says that no more of it comes. */
  update(complete) {
    const { role, content, reasoning, tokens } = this.message;
    this.node.setAttribute("aria-busy", String(!complete)); // so that it is read out once, when it is complete
    this.reasoning.hidden = !reasoning;
    if (reasoning) render(this.thoughts, reasoning);
    if (role !== "assistant") this.text.textContent = content;
    else if (tokens?.length && !this.misread) this.showTokens(tokens, complete);
    else render(this.text, content);
    if (complete) this.showEnd();
  }

  /**
   * Shows the tokens that the answer's text is made of. Others, such as the end of the turn and the marks of reasoning, are
   * no part of it. A token whose text has not come yet is shown later.
   */
  showTokens(tokens, complete) {
    if (!this.tokens) {
      this.read = 0; // of the tokens
      this.at = 0; // bytes of the text that they were
      this.shown = []; // the index of each token that has a place on the page
      this.decoder = new TextDecoder();
      this.tokens = element("div", { class: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens. Arrow keys show how probable each one was." });
      this.chosen = element("p", { class: "chosen", role: "status" });
      this.tokens.addEventListener("click", (event) => this.choose([...this.tokens.children].indexOf(event.target)));
      this.tokens.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) this.choose(Math.max(0, (this.index ?? -1) + step));
        if (step) event.preventDefault();
      });
      this.text.replaceChildren(this.tokens, this.chosen);
    }
    const { content, reasoning } = this.message;
    const before = new TextEncoder().encode(reasoning ?? "").length;
    const text = new TextEncoder().encode((reasoning ?? "") + content);
    for (; this.read < tokens.length; this.read++) {
      if (this.at === text.length && !complete) return;
      const [, logprob, , all] = tokens[this.read];
      // Spaces where a text begins are not always part of it.
      const bytes = continues(text, this.at, all) ? all : all.slice(all.findIndex((byte) => !SPACES.includes(byte)));
      if (!bytes.length || this.at === text.length || !continues(text, this.at, bytes)) continue;
      if (this.at + bytes.length > text.length && !complete) return;
      const part = this.decoder.decode(text.slice(this.at, this.at + bytes.length), { stream: true });
      this.at = Math.min(text.length, this.at + bytes.length);
      if (this.at <= before) continue;
      this.shown.push(this.read);
      this.tokens.append(element("span", { class: `p${shade(logprob)}`, textContent: visible(part) }));
    }
    if (complete && this.at < text.length) {
      this.misread = true; // the tokens are not those of the text: it is shown without them
      render(this.text, content);
    }
  }

  /** Says how probable a token was, and what else could have stood there. */
  choose(index) {
    const found = this.tokens.children[index];
    if (!found) return;
    this.tokens.children[this.index]?.classList.remove("on");
    found.classList.add("on");
    this.index = index;
    const [text, logprob, others] = this.message.tokens[this.shown[index]];
    const name = (token) => (CONTROL.test(token) ? "a control token" : JSON.stringify(token));
    const rest = others.map(([token, other]) => `${name(token)} ${percent(other)}`).join(", ");
    this.chosen.textContent = `${name(text)} had ${percent(logprob)}. The most probable: ${rest}.`;
  }

  showEnd() {
    const { finish, error, usage, seconds, tool_calls: calls, answered } = this.message;
    const numbers = usage && `${usage.completion_tokens} token${usage.completion_tokens === 1 ? "" : "s"}${seconds ? ` in ${seconds.toFixed(1)} s` : ""}, prompt ${usage.prompt_tokens}${cached(usage)}`;
    this.end.textContent = [REASONS[finish], numbers].filter(Boolean).join(" ");
    if (error) this.end.append(element("span", { class: "error", role: "alert", textContent: error }));
    if (calls?.length && !this.calls.childElementCount) this.showCalls(calls, answered);
  }

  showCalls(calls, answered) {
    const boxes = calls.map((call) => {
      const box = element("textarea", { rows: 2, required: true, "aria-label": `Result of ${call.function.name}` });
      const name = element("code", { textContent: `${call.function.name}(${call.function.arguments})` });
      this.calls.append(element("div", { class: "call" }, name, answered ? null : box));
      return box;
    });
    if (answered) return;
    const send = element("button", { type: "button", textContent: "Send the results" });
    send.addEventListener("click", () => {
      const missing = boxes.find((box) => !box.reportValidity());
      if (missing || !this.onResults(boxes.map((box) => box.value))) return;
      send.remove();
      for (const box of boxes) box.disabled = true;
    });
    this.calls.append(send);
  }
}

const cached = (usage) => {
  const tokens = usage.prompt_tokens_details?.cached_tokens;
  return tokens ? ` (${tokens} of them cached)` : "";
};
