// What happens in the fleet: incidents, which stay; events, which pass; and the path of one request through it.

import { counted, duration, element, number, timeNode } from "./dom.js";

const SHOWN = 60;
const KEPT = 1000; // for the paths of requests
const TERMS = { waiting: "waiting", prefill: "prefill", neighbours: "decoding neighbours", memory: "memory", others: "delay of others", affinity: "affinity bound", session: "away from its session" };

export class Activity {
  constructor() {
    this.events = [];
    this.incidents = element("ul", { class: "incidents", tabIndex: 0, "aria-label": "Incidents" });
    this.log = element("ol", { class: "events", tabIndex: 0, "aria-label": "Events" });
    this.filter = element("input", { type: "checkbox" });
    this.filter.addEventListener("change", () => (this.log.dataset.placements = this.filter.checked ? "hidden" : "shown"));
    this.dialog = new PathDialog(this);
    this.node = element("div", { class: "activity" });
    const heading = (textContent, ...more) => element("div", { class: "section-head" }, element("h2", { textContent }), ...more);
    const hide = element("label", { class: "note" }, this.filter, " Hide placements");
    this.node.append(element("section", {}, heading("Incidents"), this.incidents), element("section", {}, heading("Events", hide), this.log), this.dialog.node);
  }

  /** Forgets the events: all that the router remembers come again. */
  clear() {
    this.events = [];
    this.log.replaceChildren();
  }

  add(events) {
    this.events = [...this.events, ...events].slice(-KEPT);
    for (const event of events) this.log.prepend(this.line(event));
    while (this.log.childElementCount > SHOWN) this.log.lastChild.remove();
    if (events.some((event) => event.request && event.request === this.dialog.request)) this.dialog.draw();
  }

  line(event) {
    const { kind, request } = event;
    const words = sentence(event);
    if (!request) return element("li", { class: kind }, timeNode(event.time), ` ${words}`);
    const open = element("button", { type: "button", class: "link", textContent: request, "aria-label": `Path of request ${request}` });
    open.addEventListener("click", () => this.dialog.open(request));
    return element("li", { class: kind }, timeNode(event.time), " ", open, ` ${words}`);
  }

  showIncidents(incidents) {
    const items = incidents.toReversed().map((each) => element("li", { class: each.back ? "over" : "" }, ...incidentNodes(each)));
    this.incidents.replaceChildren(...(items.length ? items : [element("li", { class: "none", textContent: "None. A lost engine would stay here." })]));
  }
}

function incidentNodes({ engine, lost, reason, moved, continued, on, back }) {
  const nodes = [element("strong", { textContent: engine }), " lost ", timeNode(lost)];
  if (reason) nodes.push(` (${reason})`);
  if (moved) nodes.push(element("span", { textContent: continued === moved || !continued ? `${counted(continued, "answer")} continued${on.length ? ` on ${on.join(", ")}` : ""}` : `${number(continued)} of ${counted(moved, "answer")} continued on ${on.join(", ")}` }));
  nodes.push(back ? element("span", {}, "back ", timeNode(back), `, after ${duration(Math.max(0, back - lost))}`) : element("span", { textContent: "not back yet" }));
  return nodes;
}

/** An event in words, behind the id of its request. */
function sentence({ kind, engine, attempt, prompt_tokens: prompt, cached_tokens: cached, reason, count }) {
  switch (kind) {
    case "placed":
      return `${attempt > 1 ? "continued" : "placed"} on ${engine}: ${number(cached)} of ${counted(prompt, "prompt token")} cached`;
    case "attempt_lost":
      return `left ${engine}: ${reason}`;
    case "engine_full":
      return `not taken by ${engine}: ${reason}`;
    case "preempted":
      return `${engine} preempted ${counted(count, "sequence")}`;
    case "engine_lost":
      return `${engine} lost${reason ? `: ${reason}` : ""}`;
    default:
      return `${engine} ${{ engine_ready: "ready", engine_left: "left the fleet" }[kind]}`;
  }
}

/** The path of a request: each placement with its cost in seconds per engine, lost attempts, and the pauses between. */
class PathDialog {
  constructor(activity) {
    this.activity = activity;
    this.title = element("h2");
    this.steps = element("ol", { class: "steps" });
    const close = element("button", { type: "button", textContent: "Close", autofocus: true });
    close.addEventListener("click", () => this.node.close());
    this.node = element("dialog", { class: "path", "aria-label": "Path of a request" }, this.title, this.steps, close);
    this.node.addEventListener("close", () => (this.request = null));
    this.node.addEventListener("click", (event) => event.target === this.node && this.node.close());
  }

  open(request) {
    this.request = request;
    this.draw();
    this.node.showModal();
  }

  draw() {
    const events = this.activity.events.filter((event) => event.request === this.request);
    this.title.textContent = `Request ${this.request}`;
    const steps = [];
    events.forEach((event, index) => {
      const pause = event.kind === "placed" && events[index - 1]?.kind === "attempt_lost" ? `, after a pause of ${duration(event.time - events[index - 1].time)}` : "";
      const step = element("li", { class: event.kind }, timeNode(event.time), ` ${sentence(event)}${pause}`);
      if (event.kind === "placed" && event.scores.length) step.append(costs(event));
      steps.push(step);
    });
    if (!steps.length) steps.push(element("li", { textContent: "It was placed before this view was open." }));
    this.steps.replaceChildren(...steps);
  }
}

function costs(event) {
  const rows = event.scores.map(([engine, terms]) => {
    const total = Object.values(terms).reduce((sum, value) => sum + value, 0);
    const parts = Object.entries(terms).filter(([, value]) => value).map(([name, value]) => `${TERMS[name] ?? name} ${duration(value)}`);
    const name = engine === event.engine ? `${engine} (chosen)` : engine;
    return element("tr", {}, ...[name, duration(total), parts.join(", ") || "–"].map((textContent) => element("td", { textContent })));
  });
  const heads = ["Engine", "Cost", "Terms"].map((name) => element("th", { scope: "col", textContent: name }));
  return element("div", { class: "table", tabIndex: 0 }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}
