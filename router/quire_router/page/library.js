// The conversations that this browser keeps, and their list: search, open, rename, delete, export, import.

import { Conversation } from "./conversation.js";
import { element, iconButton } from "./dom.js";
import { keep, randomId, stored } from "./storage.js";

const PREFIX = "quire.chat.";
const UNDO = 8000; // milliseconds
const DAY = 86400000;

export class Library {
  /** `onOpen(conversation)` shows one; `say(text, action)` tells the user something, with a button. */
  constructor(root, { onOpen, say }) {
    Object.assign(this, { root, onOpen, say, all: new Map(), shown: null });
    this.list = root.querySelector("#conversations");
    this.search = root.querySelector("#search");
    this.search.addEventListener("input", () => this.draw());
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.search.value) return;
      event.preventDefault(); // Escape would also stop an answer
      this.search.value = "";
      this.draw();
    });
    for (const name of Object.keys(localStorage)) if (name.startsWith(PREFIX)) this.load(name);
    addEventListener("storage", ({ key, newValue }) => this.onOtherTab(key, newValue));
    root.querySelector("#export").addEventListener("click", () => this.export());
    const file = root.querySelector("#import-file");
    root.querySelector("#import").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      if (file.files.length) this.import(await file.files[0].text());
      file.value = "";
    });
    this.draw();
  }

  load(name) {
    const found = Conversation.read(stored(name));
    if (found) this.all.set(found.id, found);
  }

  /** Another tab has changed or removed a conversation. The one that is shown here stays as it is. */
  onOtherTab(key, value) {
    const id = key?.startsWith(PREFIX) && key.slice(PREFIX.length);
    if (!id || id === this.shown) return;
    if (value === null) this.all.delete(id);
    else this.load(key);
    this.draw();
  }

  /**
   * Stores a conversation: the text and the position behind it together, so that a reload neither repeats nor skips a
   * token. Where that is too large, log-probabilities are left out of what is stored. Returns false if there is no room.
   */
  save(conversation) {
    if (!conversation.messages.length || conversation.isDeleted) return true;
    const isNew = !this.all.has(conversation.id);
    this.all.set(conversation.id, conversation);
    if (isNew) this.draw();
    const smaller = () => ({ ...conversation, messages: conversation.messages.map(withoutTokens) });
    const name = PREFIX + conversation.id;
    return keep(name, JSON.stringify(conversation)) || keep(name, JSON.stringify(smaller()));
  }

  /** Marks the conversation that is shown. */
  show(conversation) {
    this.shown = conversation.id;
    this.draw();
  }

  draw() {
    const words = this.search.value.trim();
    const found = [...this.all.values()].filter((each) => each.contains(words)).sort((one, two) => two.updated - one.updated);
    const rows = [];
    let last = "";
    for (const each of found) {
      const age = ageOf(each.updated);
      if (age !== last) rows.push(element("li", { class: "age", textContent: age }));
      last = age;
      rows.push(this.row(each));
    }
    if (!rows.length) rows.push(element("li", { class: "note", textContent: words ? "No conversation has this text." : "Conversations are kept in this browser." }));
    this.list.replaceChildren(...rows);
  }

  row(conversation) {
    const open = element("button", { type: "button", class: "open", textContent: conversation.name, title: conversation.name });
    if (conversation.id === this.shown) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.onOpen(conversation));
    const row = element("li", { class: "conversation-row" }, open);
    const rename = iconButton("edit", `Rename ${conversation.name}`, () => this.rename(conversation, row));
    row.append(rename, iconButton("delete", `Delete ${conversation.name}`, () => this.delete(conversation)));
    return row;
  }

  rename(conversation, row) {
    const field = element("input", { value: conversation.name, "aria-label": "Name of the conversation", maxLength: 200 });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") field.value = conversation.name;
      if (event.key === "Escape" || event.key === "Enter") field.blur();
    });
    field.addEventListener("blur", () => {
      if (field.value.trim()) conversation.title = field.value.trim();
      this.save(conversation);
      this.draw();
    });
    row.replaceChildren(field);
    field.select();
  }

  delete(conversation) {
    conversation.isDeleted = true;
    this.all.delete(conversation.id);
    localStorage.removeItem(PREFIX + conversation.id);
    this.draw();
    if (conversation.id === this.shown) this.onOpen(new Conversation());
    const undo = () => {
      delete conversation.isDeleted;
      this.save(conversation);
      this.onOpen(conversation);
    };
    this.say(`Deleted “${conversation.name}”.`, { name: "Undo", run: undo, milliseconds: UNDO });
  }

  export() {
    const text = JSON.stringify({ quire: "conversations", version: 1, conversations: [...this.all.values()] }, null, 1);
    const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const date = new Date().toISOString().slice(0, 10);
    element("a", { href, download: `quire-conversations-${date}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 1000);
  }

  /** Adds the conversations of an exported file; those that are here already come as copies. */
  import(text) {
    let found = null;
    try {
      found = JSON.parse(text).conversations.map((each) => Conversation.read(each));
    } catch {
      // said below
    }
    if (!found?.length || found.includes(null)) return this.say("This file has no conversations of Quire.");
    let kept = true;
    for (const each of found) {
      if (this.all.has(each.id)) each.id = randomId();
      each.pending = null;
      kept = this.save(each) && kept;
    }
    this.draw();
    this.onOpen(found[0]);
    return this.say(kept ? `Imported ${found.length === 1 ? "1 conversation" : `${found.length} conversations`}.` : "There is no room in this browser to keep all of them.");
  }
}

/** A copy whose `tokens` are null, if it has any: those that come after a reload alone would be a part of its text. */
function withoutTokens(message) {
  return message.tokens ? { ...message, tokens: null } : message;
}

function ageOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
  if (days < 1) return "Today";
  return days < 2 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
}
