// One message of a conversation on the page: its text, reasoning, tool calls, how it ended, and what can be done with it.

import { copyButton, counted, duration, element, iconButton, number } from "./dom.js";
import { render } from "./markdown.js";
import { TokenView } from "./tokens.js";

const REASONS = {
  length: "Reached max tokens",
  abort: "Stopped",
  tool_calls: "Calls tools",
  deadline: "Reached its time limit",
};

/**
 * Shows `message`. `on` has what its buttons do: `results(texts)` for those of its tool calls, `edit(text)`, `retry()`,
 * `branch()` and `sibling(step)`. `place` is `[index, count]` among the versions of the message, and `limits` has the
 * context length of each model.
 */
export class MessageView {
  constructor(message, { on, place, limits }) {
    Object.assign(this, { message, on, place, limits });
    this.thoughts = element("div");
    this.reasoning = element("details", { class: "reasoning", hidden: true }, element("summary", { textContent: "Reasoning" }), this.thoughts);
    this.text = element("div", { class: "text" });
    this.calls = element("div");
    this.notes = element("div", { class: "notes" });
    this.end = element("p", { class: "end" });
    this.actions = element("div", { class: "actions" });
    const who = { user: "You", assistant: message.model ?? "Model", tool: "Tool result" }[message.role];
    const foot = element("footer", {}, this.end, this.actions);
    this.node = element("article", { class: `message ${message.role}`, "aria-label": who }, element("h2", { textContent: who }));
    this.node.append(this.reasoning, this.text, this.calls, this.notes, foot);
    this.update(true);
  }

  /** Shows what the message is now; `complete` says that no more of it comes. */
  update(complete) {
    const { role, content, reasoning, tokens } = this.message;
    this.node.setAttribute("aria-busy", String(!complete)); // so that it is read out once, when it is complete
    this.reasoning.hidden = !reasoning;
    if (reasoning) render(this.thoughts, reasoning);
    if (role !== "assistant") this.text.textContent = content;
    else if (!tokens?.length || !this.showTokens(complete)) render(this.text, content);
    this.showNotes();
    this.end.textContent = this.figures();
    this.actions.hidden = !complete;
    if (complete) this.showEnd();
  }

  showTokens(complete) {
    if (this.misread) return false;
    if (!this.tokens) this.text.replaceChildren(...(this.tokens = new TokenView(this.message)).nodes);
    if (this.tokens.update(complete)) return true;
    this.misread = true;
    this.text.replaceChildren();
    return false;
  }

  showNotes() {
    const { moves, ignored } = this.message;
    const lines = (moves ?? []).map((text) => `${text[0].toUpperCase()}${text.slice(1)}.`);
    if (ignored?.length) lines.push(`The server ignored ${ignored.join(", ")}${ignored.includes("tools") ? ": this model's chat template knows no tools" : ""}.`);
    if (this.notes.childElementCount !== lines.length) this.notes.replaceChildren(...lines.map((textContent) => element("p", { textContent })));
  }

  figures() {
    const { finish, usage, seconds, first, model } = this.message;
    const said = [REASONS[finish]];
    if (usage) {
      const { completion_tokens: drawn, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
      if (first !== undefined && seconds > first && drawn > 1) said.push(`${number(Math.round((drawn - 1) / (seconds - first)))} tokens/s`);
      if (first !== undefined) said.push(`first token ${duration(first)}`);
      said.push(counted(drawn, "token"));
      const limit = this.limits.get(model);
      said.push(`context ${number(prompt + drawn)}${limit ? ` of ${number(limit)}` : ""}`);
      if (details?.cached_tokens) said.push(`${number(details.cached_tokens)} cached`);
    }
    return said.filter(Boolean).join(" · ");
  }

  showEnd() {
    const { error, tool_calls: calls, answered, role, content } = this.message;
    this.failure?.remove();
    if (error) {
      this.failure = element("p", { class: "error", role: "alert", textContent: error }, " ", this.button("Try again", () => this.on.retry()));
      if (!content) this.failure.append(element("span", { class: "note", textContent: " The question is not sent again with the next one." }));
      this.notes.after(this.failure);
    }
    if (calls?.length && !this.calls.childElementCount) this.showCalls(calls, answered);
    if (role === "tool") return;
    const [index, count] = this.place;
    const versions = element("span", { class: "versions" });
    if (count > 1) {
      const step = (name, label, by) => Object.assign(iconButton(name, label, () => this.on.sibling(by)), { disabled: index + by < 0 || index + by >= count });
      versions.append(step("previous", "Previous version", -1), `${index + 1}/${count}`, step("next", "Next version", 1));
    }
    const edit = role === "user" ? iconButton("edit", "Edit", () => this.edit()) : iconButton("retry", "Regenerate", () => this.on.retry());
    const branch = iconButton("branch", "Branch into a new conversation", () => this.on.branch());
    this.actions.replaceChildren(versions, copyButton("Copy", () => content), edit, branch);
  }

  button(textContent, action) {
    const button = element("button", { type: "button", textContent });
    button.addEventListener("click", action);
    return button;
  }

  /** Lets the user write another version of a question. */
  edit() {
    const box = element("textarea", { value: this.message.content, "aria-label": "Edit the message" });
    const close = () => {
      this.text.textContent = this.message.content;
      this.actions.hidden = false;
    };
    const send = () => box.value.trim() && this.on.edit(box.value);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    const primary = this.button("Send", send);
    primary.classList.add("primary");
    this.text.replaceChildren(box, element("div", { class: "row" }, primary, this.button("Cancel", close)));
    this.actions.hidden = true;
    box.focus();
  }

  showCalls(calls, answered) {
    const boxes = calls.map((call) => {
      const box = element("textarea", { rows: 2, required: true, "aria-label": `Result of ${call.function.name}` });
      const name = element("code", { textContent: `${call.function.name}(${call.function.arguments})` });
      this.calls.append(element("div", { class: "call" }, name, answered ? null : box));
      return box;
    });
    if (answered) return;
    const send = this.button("Send the results", () => {
      const missing = boxes.find((box) => !box.reportValidity());
      if (!missing) this.on.results(boxes.map((box) => box.value));
    });
    this.calls.append(send);
  }
}
