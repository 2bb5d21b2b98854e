// The page: its two views, the API key, and the models. Everything is fetched from the router that served it.

import { Chat } from "./chat.js";
import { Fleet } from "./fleet.js";
import { Settings } from "./settings.js";
import { ApiError, call, pause } from "./sse.js";
import { keep } from "./storage.js";

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
      keep(KEY, this.key);
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
const settings = new Settings(document.getElementById("settings"));
const chat = new Chat(session, settings);
const fleet = new Fleet(document.getElementById("fleet"), session);
const strip = document.getElementById("strip");

/** Asks for the models, again and again until the router answers, and then goes on with what was interrupted. */
async function start() {
  try {
    const { data } = await (await call("v1/models", { key: session.key })).json();
    strip.textContent = "";
    settings.offer(data.map((model) => model.id));
    chat.resume();
    fleet.restart();
  } catch (error) {
    if (error.status === 401) return session.refused(error.message);
    strip.textContent = error instanceof ApiError ? error.message : "The router cannot be reached.";
    pause(RETRY).then(start);
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab, focus) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", tab.id === "tab-fleet" ? "#fleet" : location.pathname + location.search);
  fleet.restart();
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(tabs[(index + step + tabs.length) % tabs.length], true);
  });
});
document.addEventListener("visibilitychange", () => fleet.restart());
if (location.hash === "#fleet") select(tabs[1]);
start();
