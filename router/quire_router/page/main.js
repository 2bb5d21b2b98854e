// The page: its two views, the API key, and the models. Everything is fetched from the router that served it.

import { Chat } from "./chat.js";
import { Fleet } from "./fleet.js";
import { listenToTabs, listenToTheme, Panels } from "./frame.js";
import { Settings } from "./settings.js";
import { ApiError, call, pause } from "./sse.js";

const KEY = "quire.key";
const RETRY = 2000; // milliseconds

/** The API key of this tab; empty where none is needed. */
class Session {
  constructor() {
    this.form = document.getElementById("key-form");
    this.field = document.getElementById("key");
    this.key = sessionStorage.getItem(KEY) ?? "";
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = this.field.value.trim();
      sessionStorage.setItem(KEY, this.key);
      this.form.hidden = true;
      start();
    });
  }

  refused(message) {
    document.getElementById("key-error").textContent = this.key ? message : "";
    this.form.hidden = false;
    this.field.focus();
  }
}

const session = new Session();
const panels = new Panels();
const settings = new Settings(document.getElementById("settings"), document.getElementById("model"));
const chat = new Chat(session, settings, () => panels.set("settings", true));
const fleet = new Fleet(document.getElementById("fleet"), session);
const strip = document.getElementById("strip");

/** Asks for the models until the router answers, and then continues what was interrupted. */
async function start(attempt = 1) {
  try {
    const { data } = await (await call("v1/models", { key: session.key })).json();
    strip.textContent = "";
    settings.offer(data);
    chat.resume();
    fleet.restart();
    beginToWrite();
  } catch (error) {
    if (error.status === 401) return session.refused(error.message);
    strip.textContent = error instanceof ApiError ? error.message : `The router cannot be reached (attempt ${attempt}).`;
    pause(RETRY).then(() => start(attempt + 1));
  }
}

/** Puts the cursor into the field to write in, unless that would open the keyboard of a phone, or move it from elsewhere. */
function beginToWrite() {
  const isFree = document.activeElement === document.body && document.body.dataset.view === "chat";
  if (isFree && !matchMedia("(pointer: coarse)").matches) chat.message.focus();
}

listenToTabs(() => fleet.restart());
listenToTheme(() => fleet.redraw());
settings.select.addEventListener("change", () => chat.showWelcome());
document.addEventListener("visibilitychange", () => fleet.restart());
start();
