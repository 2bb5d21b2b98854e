// A conversation: a tree of messages, of which one path is shown. Editing a message, or asking again, adds a sibling.

import { randomId } from "./storage.js";

const TITLE_LENGTH = 60;
const ROLES = ["user", "assistant", "tool"];

/**
 * `messages` are in the order in which they came: `{id, parent, role, content, …}`, where `parent` is null for the first
 * ones. `leaf` is the last message of the shown path. `pending` says how far the answer came that is being read, and
 * which `tab` reads it.
 */
export class Conversation {
  constructor({ id = randomId(), title = "", updated = Date.now(), messages = [], leaf = null, pending = null } = {}) {
    Object.assign(this, { id, title, updated, messages, leaf, pending });
  }

  /** Returns a conversation from JSON; null if that is not one. */
  static read(found) {
    const ids = new Set(found?.messages?.map?.((message) => message?.id));
    const isMessage = ({ parent, role, content }) => ROLES.includes(role) && typeof content === "string" && (parent === null || ids.has(parent));
    if (!ids.size || ids.has(undefined) || !found.messages.every(isMessage) || !ids.has(found.leaf)) return null;
    return new Conversation(found);
  }

  get name() {
    const first = this.messages[0]?.content.trim().split("\n")[0] ?? "";
    return this.title || (first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH)}…` : first) || "New chat";
  }

  /** Whether its name or one of its messages contains a text, in small letters or capitals. */
  contains(text) {
    const wanted = text.toLowerCase();
    return [this.name, ...this.messages.map((each) => each.content)].some((each) => each.toLowerCase().includes(wanted));
  }

  message(id) {
    return this.messages.find((each) => each.id === id);
  }

  siblings(message) {
    return this.messages.filter((each) => each.parent === message.parent);
  }

  /** The shown messages, up to the one `to`. */
  path(to = this.leaf) {
    const found = [];
    for (let at = this.message(to); at; at = this.message(at.parent)) found.unshift(at);
    return found;
  }

  /** Adds a message behind the one `parent`, and shows it. */
  add(message, parent = this.leaf) {
    const added = { ...message, id: Math.max(0, ...this.messages.map((each) => each.id)) + 1, parent };
    this.messages.push(added);
    this.leaf = added.id;
    this.updated = Date.now();
    return added;
  }

  /** Shows the path through a message, on to the newest end behind it. */
  show(message) {
    let last = message;
    for (let next = last; next; next = this.messages.findLast((each) => each.parent === last.id)) last = next;
    this.leaf = last.id;
  }

  /** Removes a message that nothing follows, and shows what is before it. */
  drop(message) {
    this.messages = this.messages.filter((each) => each !== message);
    this.leaf = message.parent;
  }

  /** Returns another conversation with the messages up to one. */
  branch(message) {
    const messages = structuredClone(this.path(message.id));
    return new Conversation({ title: `${this.name} (branch)`, messages, leaf: message.id });
  }

  /**
   * The messages of a request whose last one is the message `to`. A question that was never answered is not among them,
   * unless it is the last.
   */
  sentTo(to) {
    const path = this.path(to);
    const failed = new Set();
    path.forEach((message, index) => {
      if (!isFailed(message)) return;
      failed.add(message);
      if (path[index - 1]?.role === "user") failed.add(path[index - 1]);
    });
    return path.filter((message) => !failed.has(message)).map(asRequest);
  }
}

export const isFailed = (message) => Boolean(message.error) && !message.content;

function asRequest({ role, content, tool_calls, tool_call_id }) {
  const calls = tool_calls?.length ? { tool_calls } : {};
  return { role, content, ...calls, ...(tool_call_id ? { tool_call_id } : {}) };
}
