// The fleet, live: engines with their KV blocks, requests, and what happens. Fed by /v1/fleet/events while it is shown.

import { element } from "./markdown.js";
import { ApiError, call, events, pause } from "./sse.js";

const RETRY = 2000; // milliseconds
const STALE = 10000;
const KEPT_EVENTS = 60;
const STATES = ["free", "cached", "used", "shared"];
const CONDITIONS = { ready: "ready", sleeping: "asleep", connecting: "not there yet", silent: "silent", failing: "failing, set aside", leaving: "leaving", reconnecting: "connection lost, trying again", lost: "lost" };
const TERMS = { waiting: "waiting there", prefill: "computing the prompt", neighbours: "decoding neighbours", memory: "memory", others: "delay of others", affinity: "bound on affinity", session: "away from its session" };

const number = (value) => value.toLocaleString("en");
const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const seconds = (value) => (value >= 0.995 ? `${value.toFixed(1)} s` : `${Math.round(value * 1000)} ms`);

export class Fleet {
  constructor(root, session) {
    this.session = session;
    this.root = root;
    this.known = new Map();
    this.cards = new Map();
    this.note = element("p", { class: "note", role: "status" });
    this.numbers = element("dl", { class: "numbers" });
    this.engines = element("div", { class: "engines" });
    this.requests = element("tbody");
    this.omitted = element("p", { class: "note" });
    this.log = element("ol", { class: "events", role: "log", "aria-live": "polite", tabIndex: 0, "aria-label": "What happens" });
    const heads = ["Request", "Engine", "Attempt", "Prompt (cached)", "Answer"].map((name) => element("th", { scope: "col", textContent: name }));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.requests);
    const section = (title, ...nodes) => element("section", {}, element("h2", { textContent: title }), ...nodes);
    root.append(this.note, this.numbers, section("Engines", legend(), this.engines));
    root.append(section("Requests in progress at this router", element("div", { class: "table", tabIndex: 0 }, table), this.omitted));
    root.append(section("What happens", this.log));
  }

  /** Reads the stream while the view is shown, and ends it when it is not. */
  restart() {
    const shown = !this.root.hidden && !document.hidden;
    if (shown === Boolean(this.controller)) return;
    this.controller?.abort();
    this.controller = shown ? new AbortController() : null;
    if (shown) this.read(this.controller);
  }

  async read(controller) {
    const { signal } = controller;
    while (!signal.aborted) {
      let watchdog;
      const attempt = new AbortController();
      const end = () => attempt.abort();
      signal.addEventListener("abort", end);
      try {
        const response = await call("v1/fleet/events", { key: this.session.key, signal: attempt.signal });
        this.note.textContent = "";
        for await (const event of events(response)) {
          clearTimeout(watchdog);
          watchdog = setTimeout(end, STALE);
          this.apply(event.event, JSON.parse(event.data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) this.session.refused(error.message);
        this.note.textContent = error instanceof ApiError ? error.message : "The router cannot be reached. Trying again.";
        if (error.status === 401 || error.status === 403) {
          this.controller = null;
          return;
        }
      } finally {
        clearTimeout(watchdog);
        signal.removeEventListener("abort", end);
      }
      await pause(RETRY);
    }
  }

  apply(kind, update) {
    if (kind === "snapshot") {
      const here = new Set(update.engines.map((engine) => engine.id));
      update.removed = [...this.known.keys()].filter((id) => !here.has(id));
      this.log.replaceChildren();
    }
    for (const id of update.removed ?? []) {
      this.known.delete(id);
      this.cards.get(id).node.remove();
      this.cards.delete(id);
    }
    for (const engine of update.engines) {
      this.known.set(engine.id, engine);
      if (!this.cards.has(engine.id)) {
        const card = new EngineCard(engine.id);
        this.cards.set(engine.id, card);
        this.engines.append(card.node);
      }
      this.cards.get(engine.id).update(engine);
    }
    this.models = update.models ?? this.models;
    if (update.requests) this.showRequests(update.requests, update.omitted_requests);
    for (const event of update.events) this.log.prepend(eventNode(event));
    while (this.log.childElementCount > KEPT_EVENTS) this.log.lastChild.remove();
    this.showNumbers();
  }

  showNumbers() {
    const engines = [...this.known.values()];
    const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
    const figures = {
      "Engines ready": `${engines.filter((engine) => engine.condition === "ready").length} of ${engines.length}`,
      Waiting: number(sum(this.models.map((model) => model.queued)) + sum(engines.map((engine) => engine.waiting))),
      Running: number(sum(engines.map((engine) => engine.requests))),
      "Tokens a second": number(Math.round(sum(engines.map((engine) => engine.tokens_per_second)))),
    };
    this.numbers.replaceChildren(...Object.entries(figures).map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
  }

  showRequests(requests, omitted) {
    const row = (each) => [each.id, each.engine || "waits", each.attempt, `${number(each.prompt_tokens)} (${number(each.cached_tokens)})`, number(each.output_tokens)];
    this.requests.replaceChildren(...requests.map((each) => element("tr", {}, ...row(each).map((text) => element("td", { textContent: text })))));
    this.omitted.textContent = omitted ? `and ${number(omitted)} more` : requests.length ? "" : "None.";
  }
}

function legend() {
  const names = { used: "in use", shared: "in use by several", cached: "cached", free: "free" };
  const items = Object.entries(names).map(([state, name]) => element("li", {}, element("span", { class: `key ${state}` }), name));
  return element("ul", { class: "legend", "aria-label": "States of KV blocks" }, ...items);
}

/** One engine. Its blocks are a canvas with a sentence that says the same. */
class EngineCard {
  constructor(id) {
    this.title = element("h3", { textContent: id });
    this.condition = element("span", { class: "condition" });
    this.facts = element("p", { class: "note" });
    this.pools = { device: new PoolGrid("KV memory"), host: new PoolGrid("Host memory") };
    const { device, host } = this.pools;
    this.node = element("article", { class: "engine" }, this.title, this.condition, this.facts, device.node, host.node);
  }

  update(engine) {
    this.node.dataset.condition = engine.condition;
    this.condition.textContent = CONDITIONS[engine.condition];
    const facts = [counted(engine.requests, "request"), `${number(engine.waiting)} waiting`];
    if (engine.swapped) facts.push(`${number(engine.swapped)} swapped out`);
    if (engine.tokens_per_second !== null) facts.push(`${counted(Math.round(engine.tokens_per_second), "token")} a second`);
    if (engine.hit_rate !== null) facts.push(`${Math.round(100 * engine.hit_rate)} % of prompts cached`);
    if (engine.preemptions) facts.push(counted(engine.preemptions, "preemption"));
    this.facts.textContent = facts.join(" · ");
    this.pools.device.update(engine.device);
    this.pools.host.update(engine.host);
  }
}

const CELL = 8; // pixels, of which one is the gap

class PoolGrid {
  constructor(name) {
    this.name = name;
    this.canvas = element("canvas", { role: "img" });
    this.caption = element("p", { class: "note" });
    this.node = element("div", { class: "pool" }, this.canvas, this.caption);
    new ResizeObserver(() => this.draw()).observe(this.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  update(pool) {
    this.node.hidden = !pool.total;
    const same = this.pool && this.pool.cells === pool.cells && this.pool.used === pool.used && this.pool.total === pool.total;
    this.pool = pool;
    const cached = pool.cached === null ? "" : `, ${number(pool.cached)} cached`;
    const cells = pool.blocks_per_cell > 1 ? ` A square is ${pool.blocks_per_cell} blocks.` : "";
    const rough = pool.cells ? cells : " Squares in proportion: the engine does not say what each block holds.";
    this.caption.textContent = `${this.name}: ${number(pool.used)} of ${counted(pool.total, "block")} in use${cached}.${rough}`;
    this.canvas.setAttribute("aria-label", this.caption.textContent);
    if (!same) this.draw();
  }

  /** The state of each square. */
  cells() {
    if (this.pool.cells) return Uint8Array.from(atob(this.pool.cells), (letter) => letter.charCodeAt(0));
    const count = Math.min(this.pool.total, 512);
    return new Uint8Array(count).fill(2, 0, Math.round((count * this.pool.used) / this.pool.total));
  }

  draw() {
    if (!this.pool?.total || !this.node.clientWidth) return;
    const cells = this.cells();
    const across = Math.max(1, Math.floor(this.node.clientWidth / CELL));
    const rows = Math.ceil(cells.length / across);
    const scale = devicePixelRatio || 1;
    this.canvas.width = across * CELL * scale;
    this.canvas.height = rows * CELL * scale;
    this.canvas.style.width = `${across * CELL}px`;
    const style = getComputedStyle(this.canvas);
    const colours = STATES.map((state) => style.getPropertyValue(`--${state}`));
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    cells.forEach((state, index) => {
      context.fillStyle = colours[state];
      context.fillRect((index % across) * CELL, Math.floor(index / across) * CELL, CELL - 1, CELL - 1);
    });
  }
}

/** An event as a line of the log; a placement can be unfolded to see why. */
function eventNode(event) {
  const time = element("time", { dateTime: new Date(event.time * 1000).toISOString(), textContent: new Date(event.time * 1000).toLocaleTimeString() });
  if (event.kind === "placed" && event.scores.length) {
    return element("li", { class: event.kind }, element("details", {}, element("summary", {}, time, ` ${sentence(event)}`), reasons(event)));
  }
  return element("li", { class: event.kind }, time, ` ${sentence(event)}`);
}

function sentence({ kind, request, engine, attempt, prompt_tokens: prompt, cached_tokens: cached, reason, count }) {
  switch (kind) {
    case "placed":
      return `${request} ${attempt > 1 ? "goes on at" : "went to"} ${engine}: ${number(cached)} of ${counted(prompt, "prompt token")} cached there`;
    case "attempt_lost":
      return `${request} lost ${engine}: ${reason}`;
    case "engine_full":
      return `${engine} did not take ${request}: ${reason}`;
    case "preempted":
      return `${engine} preempted ${counted(count, "sequence")}`;
    default:
      return `${engine} ${{ engine_ready: "is ready", engine_lost: "is lost", engine_left: "has left" }[kind]}`;
  }
}

function reasons(event) {
  const rows = event.scores.map(([engine, terms]) => {
    const total = Object.values(terms).reduce((sum, value) => sum + value, 0);
    const parts = Object.entries(terms).filter(([, value]) => value).map(([name, value]) => `${TERMS[name] ?? name} ${seconds(value)}`);
    const name = engine === event.engine ? `${engine} (chosen)` : engine;
    return element("tr", {}, element("td", { textContent: name }), element("td", { textContent: seconds(total) }), element("td", { textContent: parts.join(", ") || "nothing" }));
  });
  const heads = ["Engine", "Cost", "Made of"].map((name) => element("th", { scope: "col", textContent: name }));
  return element("div", { class: "table", tabIndex: 0 }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}
