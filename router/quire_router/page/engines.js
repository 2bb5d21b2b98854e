// One engine of the fleet: what it runs, how it is, and what its KV blocks hold.

import { clock, counted, duration, element, number } from "./dom.js";

const STATES = ["free", "cached", "used", "shared"];
const NAMES = { used: "in use", shared: "shared", cached: "cached", free: "free" };
const CONDITIONS = { ready: "ready", sleeping: "asleep", connecting: "not connected yet", silent: "silent", failing: "failing", leaving: "leaving", reconnecting: "connection lost", lost: "lost" };
const AWAY = ["lost", "reconnecting", "connecting"];
const ROOM = 4; // engines whose blocks are shown without being asked for

export function legend() {
  const items = Object.entries(NAMES).map(([state, name]) => element("li", {}, element("span", { class: `key ${state}` }), name));
  return element("ul", { class: "legend", "aria-label": "States of KV blocks" }, ...items);
}

export class EngineCard {
  constructor(id, count) {
    this.title = element("h3", { textContent: id });
    this.condition = element("span", { class: "condition" });
    this.problem = element("p", { class: "problem" });
    this.facts = element("p", { class: "note" });
    this.figures = element("p", { class: "figures" });
    this.pools = { device: new PoolGrid("KV memory"), host: new PoolGrid("Host memory") };
    const { device, host } = this.pools;
    const isOpen = count <= ROOM && matchMedia("(min-width: 68rem)").matches;
    this.maps = element("details", { open: isOpen }, element("summary", { textContent: "Block map" }), device.map, host.map);
    const head = element("div", { class: "engine-head" }, this.title, this.condition);
    this.node = element("article", { class: "engine" }, head, this.problem, this.facts, this.figures, device.node, host.node, this.maps);
  }

  /** `now` is the router's Unix time, and `incident` the one since which the engine is away, if there is one. */
  update(engine, now, incident) {
    const isAway = AWAY.includes(engine.condition);
    this.node.dataset.condition = engine.condition;
    this.condition.textContent = CONDITIONS[engine.condition];
    this.problem.hidden = !isAway;
    if (isAway) {
      const since = incident ? `Lost ${clock(incident.lost)}, ${duration(Math.max(0, now - incident.lost))} ago` : "Not connected";
      const why = engine.problem || incident?.reason;
      this.problem.textContent = `${since}${why ? `: ${why}` : ""}. The router reconnects as soon as the engine is back.`;
    }
    const facts = [engine.models.join(", "), engine.device_name, engine.dtype];
    if (engine.max_model_len) facts.push(`context ${number(engine.max_model_len)}`);
    if (engine.started && !isAway) facts.push(`up ${duration(Math.max(0, now - engine.started))}`);
    this.facts.textContent = facts.filter(Boolean).join(" · ");
    const figures = [counted(engine.requests, "request"), `${number(engine.waiting)} waiting`];
    if (engine.swapped) figures.push(`${number(engine.swapped)} swapped out`);
    if (engine.tokens_per_second !== null) figures.push(`${number(Math.round(engine.tokens_per_second))} tokens/s`);
    if (engine.hit_rate !== null) figures.push(`${Math.round(100 * engine.hit_rate)} % of prompts cached`);
    if (engine.preemptions) figures.push(counted(engine.preemptions, "preemption"));
    this.figures.textContent = figures.join(" · ");
    this.figures.hidden = isAway;
    this.pools.device.update(engine.device);
    this.pools.host.update(engine.host);
    this.maps.hidden = isAway || !engine.device.total;
  }

  redraw() {
    for (const pool of Object.values(this.pools)) pool.draw();
  }
}

const CELL = 8; // pixels, of which one is the gap

/** One tier of an engine's KV memory: a bar with a sentence, and a map of its blocks, a canvas that says the same. */
class PoolGrid {
  constructor(name) {
    this.name = name;
    this.canvas = element("canvas", { role: "img" });
    this.caption = element("p", { class: "note" });
    this.squares = element("p", { class: "note" });
    this.bar = STATES.slice(1, 3).map((state) => element("span", { class: state }));
    this.node = element("div", { class: "pool" }, element("div", { class: "bar-of-blocks", "aria-hidden": "true" }, ...this.bar.toReversed()), this.caption);
    this.map = element("div", { class: "pool-map", tabIndex: 0, role: "group", "aria-label": `Blocks of ${name}` }, this.canvas, this.squares);
    new ResizeObserver(() => this.draw()).observe(this.map);
  }

  update(pool) {
    const isUsed = this.name !== "Host memory" || pool.used > 0;
    this.node.hidden = this.map.hidden = !pool.total || !isUsed;
    const same = this.pool && this.pool.cells === pool.cells && this.pool.used === pool.used && this.pool.total === pool.total;
    this.pool = pool;
    const cached = pool.cached === null ? "" : `, ${number(pool.cached)} cached`;
    this.caption.textContent = `${this.name}: ${number(pool.used)} of ${counted(pool.total, "block")} in use${cached}`;
    const count = pool.blocks_per_cell > 1 ? `${this.name}: one square is ${pool.blocks_per_cell} blocks.` : "";
    this.squares.textContent = pool.cells ? count : "Squares in proportion: the engine does not report its blocks.";
    this.canvas.setAttribute("aria-label", this.caption.textContent);
    const [cachedBar, usedBar] = this.bar;
    usedBar.style.width = `${(100 * pool.used) / Math.max(1, pool.total)}%`;
    cachedBar.style.width = `${(100 * (pool.cached ?? 0)) / Math.max(1, pool.total)}%`;
    if (!same) this.draw();
  }

  /** The state of each square. */
  cells() {
    if (this.pool.cells) return Uint8Array.from(atob(this.pool.cells), (letter) => letter.charCodeAt(0));
    const count = Math.min(this.pool.total, 512);
    return new Uint8Array(count).fill(2, 0, Math.round((count * this.pool.used) / this.pool.total));
  }

  draw() {
    if (!this.pool?.total || !this.map.clientWidth) return;
    const cells = this.cells();
    const across = Math.max(1, Math.floor(this.map.clientWidth / CELL));
    const rows = Math.ceil(cells.length / across);
    const scale = devicePixelRatio || 1;
    this.canvas.width = across * CELL * scale;
    this.canvas.height = rows * CELL * scale;
    this.canvas.style.width = `${across * CELL}px`;
    const colours = STATES.map((state) => getComputedStyle(document.querySelector(`.key.${state}`)).backgroundColor);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    cells.forEach((state, index) => {
      context.fillStyle = colours[state];
      context.fillRect((index % across) * CELL, Math.floor(index / across) * CELL, CELL - 1, CELL - 1);
    });
  }
}
