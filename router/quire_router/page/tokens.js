// The tokens of an answer, each on a ground that says how probable it was, with their alternatives.

import { element } from "./dom.js";

const LEAST = [0.95, 0.8, 0.6, 0.4, 0.2, 0.1, 0.03]; // the least probability of each shade but the last
const CONTROL = /^<[|｜][^<>]*[|｜]>$|^<\/?s>$|^<(bos|eos|pad|start_of_turn|end_of_turn)>$/;
const SPACES = [9, 10, 13, 32];

/** The shade of a token: 0 for a certain one, up to 7. */
const shade = (logprob) => LEAST.findIndex((least) => Math.exp(logprob) >= least) + (Math.exp(logprob) < LEAST.at(-1) ? 8 : 0);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;
const visible = (text) => text.replaceAll("\n", "⏎\n");
const quoted = (token) => (CONTROL.test(token) ? "a control token" : JSON.stringify(token));

/** Whether the bytes of a token are the next ones of `text` from `at` on, as far as that is there. */
const continues = (text, at, bytes) => bytes.every((byte, index) => at + index >= text.length || text[at + index] === byte);

export class TokenView {
  constructor(message) {
    this.message = message;
    this.read = 0; // of the message's tokens
    this.at = 0; // bytes of the text that they were
    this.shown = []; // the index of each token that has a place on the page
    this.decoder = new TextDecoder();
    this.tokens = element("div", { class: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens. Arrow keys show how probable each one was." });
    this.chosen = element("p", { class: "chosen", role: "status", textContent: "Select a token to see its alternatives." });
    this.tokens.addEventListener("click", (event) => this.choose([...this.tokens.children].indexOf(event.target)));
    this.tokens.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) this.choose(Math.max(0, (this.index ?? -1) + step));
      if (step) event.preventDefault();
    });
    this.nodes = [this.tokens, scale(), this.chosen];
  }

  /**
   * Shows the tokens that the answer's text is made of. Others, such as the end of the turn and the marks of reasoning, are
   * no part of it. A token whose text has not come yet is shown later. Returns false if they are not those of the text.
   */
  update(complete) {
    const { content, reasoning, tokens } = this.message;
    const before = new TextEncoder().encode(reasoning ?? "").length;
    const text = new TextEncoder().encode((reasoning ?? "") + content);
    for (; this.read < tokens.length; this.read++) {
      if (this.at === text.length && !complete) return true;
      const [, logprob, , all] = tokens[this.read];
      // Spaces where a text begins are not always part of it.
      const bytes = continues(text, this.at, all) ? all : all.slice(all.findIndex((byte) => !SPACES.includes(byte)));
      if (!bytes.length || this.at === text.length || !continues(text, this.at, bytes)) continue;
      if (this.at + bytes.length > text.length && !complete) return true;
      const part = this.decoder.decode(text.slice(this.at, this.at + bytes.length), { stream: true });
      this.at = Math.min(text.length, this.at + bytes.length);
      if (this.at <= before) continue;
      this.shown.push(this.read);
      this.tokens.append(element("span", { class: `p${shade(logprob)}`, textContent: visible(part) }));
    }
    return !complete || this.at >= text.length;
  }

  /** Says how probable a token was, and what else could have stood there. */
  choose(index) {
    const found = this.tokens.children[index];
    if (!found) return;
    this.tokens.children[this.index]?.classList.remove("on");
    found.classList.add("on");
    this.index = index;
    const [text, logprob, others] = this.message.tokens[this.shown[index]];
    const rest = others.map(([token, other]) => `${quoted(token)} ${percent(other)}`).join(", ");
    this.chosen.textContent = `${quoted(text)} had ${percent(logprob)}. The most probable: ${rest}.`;
  }
}

function scale() {
  const steps = LEAST.map((least, index) => element("span", { class: `p${index + 1}`, title: `below ${100 * least} %` }));
  return element("p", { class: "scale" }, element("span", { class: "words", textContent: "above 95 %" }), ...steps, element("span", { class: "words", textContent: "below 3 %" }));
}
