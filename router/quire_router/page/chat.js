// The playground: one conversation, and the field to write in. An answer that a reload interrupted continues where it was.

import { Answers } from "./answers.js";
import { Conversation, isFailed } from "./conversation.js";
import { element } from "./dom.js";
import { Library } from "./library.js";
import { MessageView } from "./messages.js";
import { SettingError } from "./settings.js";

const OPEN = "quire.open"; // of this tab
const NEAR = 120; // pixels
const SUGGESTIONS = ["Tell me a story about a fox.", "What is 7 plus 5?", "Write a Python function that reverses a list.", "Explain what a KV cache is, in three sentences."];

export class Chat {
  /** `session` has the API key; `openSettings()` brings the parameters into view. */
  constructor(session, settings, openSettings) {
    Object.assign(this, { session, settings, openSettings, views: [] });
    for (const id of ["log", "latest", "status", "composer", "message", "send", "stop", "clear", "welcome"]) this[id] = document.getElementById(id);
    const shown = (each) => each === this.conversation;
    this.answers = new Answers(session, {
      changed: (each) => shown(each) && this.draw(),
      ended: (each) => this.ended(each),
      paused: (each, why) => shown(each) && this.say(why),
      save: (each) => this.save(each),
    });
    const say = (...words) => this.say(...words);
    this.library = new Library(document.getElementById("library"), { onOpen: (each) => this.open(each), say });
    this.welcome.querySelector("ul").append(...SUGGESTIONS.map((text) => this.suggestion(text)));
    this.listen();
    this.open(this.library.all.get(sessionStorage.getItem(OPEN)) ?? new Conversation());
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
    this.log.addEventListener("scroll", () => this.showLatest());
    new ResizeObserver(() => this.stay()).observe(this.log);
    this.latest.addEventListener("click", () => {
      this.log.scrollTop = this.log.scrollHeight;
      this.log.focus();
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented) this.cancel();
      if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) this.startOver(event);
    });
    addEventListener("pagehide", () => this.save(this.conversation));
  }

  suggestion(textContent) {
    const button = element("button", { type: "button", textContent });
    button.addEventListener("click", () => this.ask([{ role: "user", content: textContent }]));
    return element("li", {}, button);
  }

  /** Continues the answers of this tab that a reload interrupted, now that the models are known. */
  resume() {
    for (const each of this.library.all.values()) {
      if (each.pending && this.answers.isOwn(each) && !this.answers.isRunning(each)) this.answers.read(each);
    }
    this.show();
  }

  continue() {
    this.answers.read(this.conversation);
    this.showBusy();
  }

  open(conversation) {
    this.conversation = conversation;
    sessionStorage.setItem(OPEN, conversation.id);
    this.library.show(conversation);
    this.say("");
    this.show();
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Shows the conversation as it is now. */
  show() {
    const path = this.conversation.path();
    this.views = path.map((message) => this.view(message));
    this.log.replaceChildren(...this.views.map((view) => view.node));
    this.showWelcome();
    this.showBusy();
    const { pending } = this.conversation;
    if (pending && !this.answers.isRunning(this.conversation) && !this.answers.isOwn(this.conversation)) this.offerRest();
  }

  /** The tab that read the answer is gone, or still reads it. */
  offerRest() {
    this.say("This answer was interrupted.", { name: "Continue", run: () => this.continue() });
  }

  showWelcome() {
    this.welcome.hidden = this.views.length > 0;
    this.log.hidden = !this.welcome.hidden;
    this.showLatest();
    this.welcome.querySelector("#welcome-model").textContent = this.settings.model || "No model yet";
    this.welcome.querySelector("#welcome-facts").textContent = this.settings.facts;
  }

  view(message) {
    const { conversation } = this;
    const siblings = conversation.siblings(message);
    const index = siblings.indexOf(message);
    const on = {
      results: (texts) => this.sendResults(message, texts),
      edit: (content) => this.ask([{ role: "user", content }], message.parent),
      retry: () => this.retry(message),
      branch: () => this.branch(message),
      sibling: (step) => {
        if (this.answers.isRunning(conversation)) return;
        conversation.show(siblings[index + step]);
        this.save(conversation);
        this.show();
      },
    };
    return new MessageView(message, { on, place: [index, siblings.length], limits: this.settings.limits });
  }

  /** Sends some messages behind the one `parent`. Returns false if that is not possible now. */
  ask(messages, parent = this.conversation.leaf) {
    const { conversation } = this;
    const fields = this.fields();
    if (!fields || this.answers.isRunning(conversation)) return false;
    let last = parent;
    for (const message of messages) last = conversation.add(message, last).id;
    const sent = [...this.settings.system(), ...conversation.sentTo(last)];
    conversation.add({ role: "assistant", content: "", model: fields.model }, last);
    this.answers.begin(conversation, { ...fields, messages: sent });
    this.save(conversation);
    this.library.draw();
    this.show();
    this.log.scrollTop = this.log.scrollHeight;
    return true;
  }

  /** The fields of a request; null, with what is wrong shown, if they cannot be sent. */
  fields() {
    try {
      return this.settings.request();
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.openSettings();
      error.field.focus();
      this.say(error.message);
      return null;
    }
  }

  /** Asks again. An answer that has a text stays, as another version. */
  retry(message) {
    if (this.answers.isRunning(this.conversation) || !this.fields()) return;
    if (isFailed(message)) this.conversation.drop(message);
    this.ask([], message.parent);
  }

  branch(message) {
    const branch = this.conversation.branch(message);
    this.save(branch);
    this.open(branch);
    this.message.focus();
  }

  sendResults(message, results) {
    const messages = results.map((content, index) => ({ role: "tool", tool_call_id: message.tool_calls[index].id, content }));
    message.answered = true;
    if (!this.ask(messages, message.id)) message.answered = false;
  }

  /** Draws what came, once a frame. */
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.answers.isRunning(this.conversation)) this.views.at(-1).update(false);
      this.follow();
    });
  }

  ended(conversation) {
    this.save(conversation);
    this.library.draw();
    if (conversation !== this.conversation) return;
    this.say(this.status.dataset.warning ?? "");
    this.views.at(-1).update(true);
    this.showBusy();
    this.follow();
  }

  follow() {
    if (this.isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    this.showLatest();
  }

  get isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
  }

  /** Offers the way to the end of the conversation, if it is out of sight. */
  showLatest() {
    this.latest.hidden = this.log.hidden || this.isAtEnd;
  }

  /** Keeps the end in sight where the window or the field to write in changes its size: a phone's keyboard takes half of it. */
  stay() {
    if (this.latest.hidden) this.log.scrollTop = this.log.scrollHeight;
    this.showLatest();
  }

  cancel() {
    if (!this.answers.isRunning(this.conversation)) return;
    this.stop.disabled = true;
    this.answers.stop(this.conversation);
  }

  startOver(event) {
    event?.preventDefault();
    this.open(new Conversation());
    this.message.focus();
  }

  showBusy() {
    const now = this.answers.isRunning(this.conversation);
    this.send.hidden = now;
    this.stop.hidden = !now;
    this.stop.disabled = false;
    if (now) this.views.at(-1)?.update(false);
  }

  /** Says something below the conversation; `action` is a button: `{name, run, milliseconds}`. */
  say(text, action) {
    clearTimeout(this.silence);
    this.status.replaceChildren(text);
    if (!action) return;
    const button = element("button", { type: "button", textContent: action.name });
    button.addEventListener("click", () => {
      this.say("");
      action.run();
    });
    this.status.append(" ", button);
    if (action.milliseconds) this.silence = setTimeout(() => this.say(""), action.milliseconds);
  }

  save(conversation) {
    const kept = this.library.save(conversation);
    if (kept) delete this.status.dataset.warning;
    else this.status.dataset.warning = "There is no room in this browser to keep this conversation. Delete others, or export it.";
    if (!kept && conversation === this.conversation) this.say(this.status.dataset.warning);
  }
}
