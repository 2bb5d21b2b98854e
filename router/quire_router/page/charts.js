// Curves of the last minute, as SVG.

import { drawing, element } from "./dom.js";

export const SPAN = 60; // seconds
const [WIDTH, HEIGHT, TOP] = [240, 56, 4];

/**
 * A figure with its curves. `series` names the lines, the first of which is the figure; `format` writes a value, and
 * `most` is the top of the scale where that is fixed.
 */
export class Chart {
  constructor(title, { series, format, most = null }) {
    Object.assign(this, { title, series, format, most, samples: [] });
    this.value = element("p", { class: "value" });
    this.legend = series.map((name, index) => element("span", { class: `line-${index}` }));
    this.lines = series.map((_, index) => drawing("path", { class: `line line-${index}` }));
    this.area = drawing("path", { class: "area" });
    this.cursor = drawing("path", { class: "cursor" });
    this.scale = element("span", { class: "scale-top" });
    this.svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, ...this.lines, this.cursor);
    const axis = element("div", { class: "axis", "aria-hidden": "true" }, element("span", { textContent: "60 s ago" }), element("span", { textContent: "now" }));
    this.node = element("article", { class: "chart" }, element("h3", { textContent: title }), this.value, element("div", { class: "plot" }, this.svg, this.scale), axis);
    if (series.length > 1) this.node.insertBefore(element("p", { class: "legend-line" }, ...this.legend), this.node.children[2]);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  /** Shows samples `{time, values}`, the last of which is now. Values may be null. */
  show(samples) {
    this.samples = samples;
    this.draw();
  }

  x(time) {
    return WIDTH * (1 - (this.samples.at(-1).time - time) / SPAN);
  }

  draw() {
    const values = this.samples.flatMap((each) => each.values).filter((value) => value !== null);
    const top = this.most ?? roundUp(Math.max(0, ...values));
    const y = (value) => HEIGHT - (HEIGHT - TOP) * (top ? Math.min(1, value / top) : 0);
    this.lines.forEach((line, index) => {
      let d = "";
      let drawn = false;
      for (const { time, values: each } of this.samples) {
        if (each[index] !== null) d += `${drawn ? "L" : "M"}${this.x(time).toFixed(1)} ${y(each[index]).toFixed(1)}`;
        drawn = each[index] !== null;
      }
      line.setAttribute("d", d);
      if (index === 0) this.area.setAttribute("d", this.samples.some((each) => each.values[0] === null) || !d ? "" : `${d}L${WIDTH} ${HEIGHT}L${this.x(this.samples[0].time).toFixed(1)} ${HEIGHT}Z`);
    });
    this.scale.textContent = top ? this.format(top) : "";
    this.say(this.samples[this.pointed] ?? this.samples.at(-1));
    const highest = values.length ? this.format(Math.max(...values)) : "nothing";
    this.svg.setAttribute("aria-label", `${this.title} over 60 seconds: ${this.said}, at most ${highest}.`);
  }

  /** Writes the values of one sample. */
  say({ values }) {
    const words = values.map((value) => (value === null ? "–" : this.format(value)));
    this.value.textContent = words[0];
    this.legend.forEach((node, index) => (node.textContent = `${this.series[index]} ${words[index]}`));
    this.said = this.series.map((name, index) => `${name} ${words[index]}`).join(", ");
  }

  /** Shows the values where the pointer is. */
  point(event) {
    if (!this.samples.length) return;
    this.pointed = undefined;
    if (event) {
      const { left, width } = this.svg.getBoundingClientRect();
      const at = this.samples.at(-1).time - SPAN * (1 - (event.clientX - left) / width);
      this.pointed = this.samples.reduce((best, each, index) => (Math.abs(each.time - at) < Math.abs(this.samples[best].time - at) ? index : best), 0);
    }
    const x = event ? this.x(this.samples[this.pointed].time) : -1;
    this.cursor.setAttribute("d", event ? `M${x} 0V${HEIGHT}` : "");
    this.say(this.samples[this.pointed] ?? this.samples.at(-1));
  }
}

/** The next round number. */
function roundUp(value) {
  if (!value) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.9999);
}
