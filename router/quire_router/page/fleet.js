// The fleet, live: figures with their curves, engines, requests and what happens. Fed by /v1/fleet/events while shown.

import { Activity } from "./activity.js";
import { Chart, SPAN } from "./charts.js";
import { clock, duration, element, number } from "./dom.js";
import { EngineCard, legend } from "./engines.js";
import { ApiError, call, events, pause } from "./sse.js";

const RETRY = 2000; // milliseconds
const STALE = 10000;
const ALL = "";
const QUANTILES = ["p50", "p95", "p99"];
const per = (value) => `${Math.round(100 * value)} %`;
const whole = (value) => number(Math.round(value));

export class Fleet {
  constructor(root, session) {
    Object.assign(this, { root, session, known: new Map(), cards: new Map(), models: [], incidents: [], history: new Map(), attempts: 0 });
    this.note = element("p", { class: "note", role: "status" });
    this.summary = element("p", { class: "summary" });
    this.links = element("p", { class: "links" });
    this.select = element("select", { "aria-label": "Model" }, new Option("All models", ALL));
    this.select.addEventListener("change", () => this.showCharts());
    this.charts = {
      tokens: new Chart("Tokens per second", { series: ["tokens/s"], format: whole }),
      ttft: new Chart("Time to first token", { series: QUANTILES, format: duration }),
      itl: new Chart("Inter-token latency", { series: QUANTILES, format: duration }),
      load: new Chart("Requests", { series: ["running", "waiting"], format: whole }),
      kv: new Chart("KV memory in use", { series: ["in use"], format: per, most: 1 }),
      hits: new Chart("Prefix cache hits", { series: ["of prompt tokens"], format: per, most: 1 }),
    };
    this.engines = element("div", { class: "engines" });
    this.requests = element("tbody");
    this.omitted = element("p", { class: "note" });
    this.activity = new Activity();
    const heads = ["Request", "Engine", "Attempt", "Prompt (cached)", "Output", "Age"].map((name) => element("th", { scope: "col", textContent: name }));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.requests);
    const section = (title, ...nodes) => element("section", {}, element("h2", { textContent: title }), ...nodes);
    root.append(element("div", { class: "fleet-head" }, this.summary, this.links, this.select), this.note);
    root.append(element("h2", { class: "hidden", textContent: "Figures" }), element("section", { class: "numbers", "aria-label": "Figures" }, ...Object.values(this.charts).map((chart) => chart.node)));
    const left = element("div", { class: "fleet-left" }, section("Engines", legend(), this.engines));
    left.append(section("Requests in progress", element("div", { class: "table", tabIndex: 0, role: "group", "aria-label": "Requests in progress" }, table), this.omitted));
    root.append(element("div", { class: "fleet-body" }, left, this.activity.node));
  }

  /** Reads the stream while the view is shown, and ends it when it is not. */
  restart() {
    const shown = !this.root.hidden && !document.hidden;
    if (shown === Boolean(this.controller)) return;
    this.controller?.abort();
    this.controller = shown ? new AbortController() : null;
    if (shown) this.read(this.controller);
  }

  /** Draws anew what has colours of its own. */
  redraw() {
    for (const card of this.cards.values()) card.redraw();
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
        this.isStale("");
        for await (const event of events(response)) {
          clearTimeout(watchdog);
          watchdog = setTimeout(end, STALE);
          this.apply(event.event, JSON.parse(event.data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) this.session.refused(error.message);
        this.attempts += 1;
        const shown = this.time ? ` What is shown is of ${clock(this.time)}.` : "";
        this.isStale(error instanceof ApiError ? error.message : `The router cannot be reached (attempt ${this.attempts}).${shown}`);
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

  /** Says why what is shown is not what is; "" if it is. */
  isStale(why) {
    if (!why) this.attempts = 0;
    this.note.textContent = why;
    this.root.classList.toggle("stale", Boolean(why));
  }

  apply(kind, update) {
    if (kind === "snapshot") {
      const here = new Set(update.engines.map((engine) => engine.id));
      update.removed = [...this.known.keys()].filter((id) => !here.has(id));
      this.router = update.router;
      this.activity.clear();
      this.history.clear();
    }
    this.time = update.time;
    this.models = update.models ?? this.models;
    this.incidents = update.incidents ?? this.incidents;
    for (const id of update.removed ?? []) {
      this.known.delete(id);
      this.cards.get(id).node.remove();
      this.cards.delete(id);
    }
    for (const engine of update.engines) this.known.set(engine.id, engine);
    this.showEngines();
    this.running = update.requests ?? this.running;
    this.showRequests(this.running, update.omitted_requests);
    this.activity.add(update.events);
    if (update.incidents) this.activity.showIncidents(update.incidents);
    this.showModels();
    this.record();
    this.showSummary();
  }

  showEngines() {
    for (const [id, engine] of this.known) {
      if (!this.cards.has(id)) {
        const card = new EngineCard(id, this.known.size);
        this.cards.set(id, card);
        this.engines.append(card.node);
      }
      const incident = this.incidents.findLast((each) => each.engine === id && !each.back);
      this.cards.get(id).update(engine, this.time, incident);
    }
  }

  showSummary() {
    const engines = [...this.known.values()];
    const ready = engines.filter((engine) => engine.condition === "ready").length;
    const { version, started, policy, metrics_port: port } = this.router;
    this.summary.replaceChildren(element("strong", { textContent: `${ready} of ${engines.length} engines ready` }), ` · Quire ${version} · up ${duration(Math.max(0, this.time - started))} · placement by ${policy}`);
    if (this.links.childElementCount) return;
    const metrics = new URL(location.href);
    Object.assign(metrics, { port: String(port), pathname: "/metrics", hash: "", search: "", protocol: "http:" });
    const links = { "API reference": "docs", "openapi.json": "openapi.json", metrics: metrics.href };
    this.links.replaceChildren(...Object.entries(links).map(([textContent, href]) => element("a", { textContent, href })));
  }

  showModels() {
    const names = this.models.map((model) => model.name);
    const here = [...this.select.options].slice(1).map((option) => option.value);
    if (names.join("\n") !== here.join("\n")) this.select.replaceChildren(new Option("All models", ALL), ...names.map((name) => new Option(name, name)));
    this.select.hidden = names.length < 2;
  }

  /** Adds what the figures are now to their histories, of all models together and of each. */
  record() {
    for (const name of [ALL, ...this.models.map((model) => model.name)]) {
      const samples = [...(this.history.get(name) ?? []), { time: this.time, ...this.figures(name) }];
      this.history.set(name, samples.filter((each) => each.time >= this.time - SPAN));
    }
    this.showCharts();
  }

  /** The values of each chart. Of several models the slowest counts for latencies. */
  figures(name) {
    const models = this.models.filter((model) => !name || model.name === name);
    const engines = [...this.known.values()].filter((engine) => !name || engine.models.includes(name));
    const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
    const most = (values) => values.reduce((best, value) => (value === null ? best : Math.max(best ?? 0, value)), null);
    const quantiles = (kind) => QUANTILES.map((_, index) => most(models.map((model) => model[kind]?.[index] ?? null)));
    const reported = engines.filter((engine) => engine.tokens_per_second !== null);
    const hits = models.map((model) => model.hit_rate).filter((rate) => rate !== null);
    const total = sum(engines.map((engine) => engine.device.total));
    return {
      tokens: [reported.length ? sum(reported.map((engine) => engine.tokens_per_second)) : sum(models.map((model) => model.tokens_per_second))],
      ttft: quantiles("ttft"),
      itl: quantiles("itl"),
      load: [sum(engines.map((engine) => engine.requests)), sum(models.map((model) => model.queued)) + sum(engines.map((engine) => engine.waiting))],
      kv: [total ? sum(engines.map((engine) => engine.device.used)) / total : null],
      hits: [hits.length ? sum(hits) / hits.length : null],
    };
  }

  showCharts() {
    const samples = this.history.get(this.select.value) ?? this.history.get(ALL);
    for (const [name, chart] of Object.entries(this.charts)) chart.show(samples.map((each) => ({ time: each.time, values: each[name] })));
  }

  showRequests(requests, omitted) {
    const row = (each) => {
      const open = element("button", { type: "button", class: "link", textContent: each.id, "aria-label": `Path of request ${each.id}` });
      open.addEventListener("click", () => this.activity.dialog.open(each.id));
      const words = [each.engine || "queue", each.attempt, `${number(each.prompt_tokens)} (${number(each.cached_tokens)})`, number(each.output_tokens), duration(Math.max(0, this.time - each.created))];
      return element("tr", {}, element("td", {}, open), ...words.map((textContent) => element("td", { textContent })));
    };
    const focused = this.requests.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.requests.replaceChildren(...requests.map(row));
    if (focused) [...this.requests.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
    this.omitted.textContent = omitted ? `and ${number(omitted)} more` : requests.length ? "" : "None.";
  }
}
