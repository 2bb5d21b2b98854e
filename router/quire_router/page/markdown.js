// Markdown as DOM nodes. Text comes from a model, so nothing here ever makes HTML out of a string: every node is created
// by name from the short list below, and all text is set as text. Images are never loaded; they become links.
//
// A model can be made to write anything, so rendering takes time in proportion to the text. Patterns match beginnings
// only, where no character can belong to two parts of them; ends are found by code, and what was not found is not looked
// for again.

import { copyButton, element } from "./dom.js";
import { highlight } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^ {0,3}>\s?/;
const RULED = /^ {0,3}[-*_]/;
const CELL_RULE = /^:?-+:?$/;
const MAX_DEPTH = 8; // of quotes and lists in each other: a model can write thousands of ">"

/** Shows `text` in `parent`, as far as it has changed: while an answer grows, only its last block is made again. */
export function render(parent, text) {
  const blocks = split(text.split("\n"), 0);
  const known = parent.renderedBlocks ?? [];
  let same = 0;
  while (same < known.length && same < blocks.length && known[same] === blocks[same].source) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const block of blocks.slice(same)) parent.append(block.node());
  parent.renderedBlocks = blocks.map((block) => block.source);
}

/** The blocks of some lines: each with its source and a function that makes its node. */
function split(lines, depth) {
  const blocks = [];
  let at = 0;
  const take = (count, node) => {
    blocks.push({ source: lines.slice(at, at + count).join("\n"), node });
    at += count;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) take(...codeBlock(lines, at, fence));
    else if (heading) take(1, () => inline(element(`h${Math.min(6, heading[1].length + 2)}`), titleOf(line, heading)));
    else if (isRule(line)) take(1, () => element("hr"));
    else if (QUOTE.test(line) && depth < MAX_DEPTH) take(...quote(lines, at, depth));
    else if (ITEM.test(line) && depth < MAX_DEPTH) take(...list(lines, at, depth));
    else if (line.includes("|") && isTableRule(lines[at + 1] ?? "")) take(...table(lines, at));
    else take(...paragraph(lines, at));
  }
  return blocks;
}

/** How many lines from `at` on are as `test` wants, at least one. */
function run(lines, at, test) {
  let end = at + 1;
  while (end < lines.length && test(lines[end], end)) end += 1;
  return end - at;
}

/** The text without `end` as often as it stands at its end. */
function without(text, end) {
  let length = text.length;
  while (length && text[length - 1] === end) length -= 1;
  return text.slice(0, length);
}

function titleOf(line, [mark]) {
  return without(line.slice(mark.length).trim(), "#").trim();
}

/** Whether a line is at least three of one mark, and spaces. */
function isRule(line) {
  if (!RULED.test(line)) return false;
  const marks = line.trim().replaceAll(" ", "");
  return marks.length >= 3 && !without(marks, marks[0]);
}

function isTableRule(line) {
  return line.includes("|") && cellsOf(line).every((cell) => CELL_RULE.test(cell));
}

/** Whether a line closes a block of code that `mark` has opened. */
function isClosing(line, mark) {
  const fence = FENCE.exec(line)?.[1] ?? "";
  return fence.startsWith(mark) && line.trim().length === fence.length;
}

function codeBlock(lines, at, [, mark, language]) {
  const body = run(lines, at, (line) => !isClosing(line, mark));
  const closed = at + body < lines.length;
  const text = lines.slice(at + 1, at + body).join("\n");
  return [closed ? body + 1 : body, () => code(text, language)];
}

function code(text, language) {
  const head = element("div", { class: "code-head" }, element("span", { textContent: language || "text" }), copyButton("Copy the code", () => text));
  const pre = element("pre", { tabIndex: 0, "aria-label": "Code" }, element("code", {}, ...highlight(text, language)));
  return element("div", { class: "code" }, head, pre);
}

function quote(lines, at, depth) {
  const count = run(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, at + count).map((line) => line.replace(QUOTE, ""));
  return [count, () => fill(element("blockquote"), inner, depth)];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const belongs = (line, index) => {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) return /\d/.test(item[2]) === ordered && item[1].length === indent.length;
    if (line.trim()) return /^\s/.test(line) || Boolean(lines[index - 1].trim());
    return /^\s+\S/.test(lines[index + 1] ?? "") || ITEM.test(lines[index + 1] ?? "");
  };
  const count = run(lines, at, belongs);
  const items = [];
  for (const line of lines.slice(at, at + count)) {
    const item = ITEM.exec(line);
    if (item && item[1].length === indent.length) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.replace(/^ {1,4}/, ""));
  }
  const node = () => {
    const found = element(ordered ? "ol" : "ul");
    if (ordered) found.start = Number.parseInt(mark, 10);
    found.append(...items.map((item) => fill(element("li"), item, depth)));
    return found;
  };
  return [count, node];
}

/** Fills a quote or an item; a single paragraph stands in it without a paragraph of its own. */
function fill(parent, lines, depth) {
  const nodes = split(lines, depth + 1).map((block) => block.node());
  if (nodes.length && nodes[0].nodeName === "P") parent.append(...nodes[0].childNodes, ...nodes.slice(1));
  else parent.append(...nodes);
  return parent;
}

function cellsOf(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines, at) {
  const count = run(lines, at, (line) => line.includes("|"));
  const row = (line, kind) => element("tr", {}, ...cellsOf(line).map((cell) => inline(element(kind), cell)));
  const node = () => {
    const head = element("thead", {}, row(lines[at], "th"));
    const body = element("tbody", {}, ...lines.slice(at + 2, at + count).map((line) => row(line, "td")));
    return element("div", { class: "table", tabIndex: 0 }, element("table", {}, head, body));
  };
  return [count, node];
}

function paragraph(lines, at) {
  const other = (line) => FENCE.test(line) || HEADING.test(line) || isRule(line) || ITEM.test(line) || QUOTE.test(line);
  const count = run(lines, at, (line) => line.trim() && !other(line));
  return [count, () => inline(element("p"), lines.slice(at, at + count).join("\n"))];
}

const MARK = /[`*_~![\\]/g;
const EMPHASIS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const ESCAPED = "\\`*_{}[]()#+.!|~-";
const MAX_LABEL = 500;
const MAX_ADDRESS = 2000;

/** Appends a text to `parent`, with its code, emphasis and links. */
function inline(parent, text, depth = 0) {
  const spans = new Spans(text, depth);
  let shown = 0;
  for (let at = spans.nextMark(0); at >= 0 && depth < MAX_DEPTH; ) {
    const { end, node } = spans.codeAt(at) ?? spans.linkAt(at) ?? spans.emphasisAt(at) ?? spans.escapedAt(at) ?? {};
    if (node !== undefined) {
      if (at > shown) parent.append(text.slice(shown, at));
      parent.append(node);
      shown = end;
    }
    at = spans.nextMark(end ?? at + 1);
  }
  if (shown < text.length) parent.append(text.slice(shown));
  return parent;
}

/**
 * The spans of a text. A method returns the `node` of the span that begins at a place, and its `end`; an `end` alone is how
 * far the text stays text. What one search has found, or not found, the next one knows, so that all together read the
 * text a few times.
 */
class Spans {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.found = new Map(); // by what was looked for: a place, and from where on there was none before it
    this.endless = new Map(); // by marks: up to where emphasis has no end
    this.address = { close: -1, end: -1 };
    this.runs = null;
  }

  nextMark(at) {
    MARK.lastIndex = at;
    return MARK.exec(this.text)?.index ?? -1;
  }

  /** Where `what` stands next from `at` on; the length of the text if nowhere. */
  next(what, at) {
    const known = this.found.get(what);
    if (known && known.from <= at && at <= known.place) return known.place;
    const place = this.text.indexOf(what, at);
    const found = { from: at, place: place < 0 ? this.text.length : place };
    this.found.set(what, found);
    return found.place;
  }

  codeAt(at) {
    if (this.text[at] !== "`") return undefined;
    this.runs ??= backticks(this.text);
    let begin = at;
    while (this.text[begin] === "`") begin += 1;
    const places = this.runs.get(begin - at) ?? []; // fewer than the run has where the first is escaped
    while (places.length && places.at(-1) < begin) places.pop();
    const end = places.at(-1);
    if (end === undefined) return { end: begin };
    return { end: end + begin - at, node: element("code", { textContent: this.text.slice(begin, end) }) };
  }

  linkAt(at) {
    const image = this.text.startsWith("![", at);
    if (!image && this.text[at] !== "[") return undefined;
    const begin = at + (image ? 2 : 1);
    const close = this.next("]", begin);
    if (close > begin + MAX_LABEL || this.next("\n", begin) < close) return undefined;
    const end = this.endOfAddress(close);
    if (end < 0) return undefined;
    const label = this.text.slice(begin, close);
    return { end: end + 1, node: link(image ? `image: ${label}` : label, this.text.slice(close + 2, end)) };
  }

  /** Where the address ends that stands behind a label; -1 if there is none. */
  endOfAddress(close) {
    if (this.address.close !== close) {
      const end = this.text[close + 1] === "(" ? this.next(")", close + 2) : this.text.length;
      const isShort = end < Math.min(this.text.length, close + 3 + MAX_ADDRESS) && end > close + 2;
      const allowed = isShort && !/[(\s]/.test(this.text.slice(close + 2, end));
      this.address = { close, end: allowed ? end : -1 };
    }
    return this.address.end;
  }

  emphasisAt(at) {
    for (const mark of [this.text.slice(at, at + 2), this.text[at]]) {
      const begin = at + mark.length;
      if (!Object.hasOwn(EMPHASIS, mark) || /^\s?$/.test(this.text[begin] ?? "")) continue;
      const end = this.endOfEmphasis(mark, begin);
      const text = this.text.slice(begin, end);
      if (end <= begin || !without(text, mark[0])) continue; // a line to write on is no emphasis
      return { end: end + mark.length, node: inline(element(EMPHASIS[mark]), text, this.depth + 1) };
    }
    return undefined;
  }

  /** Where emphasis ends whose text begins at `begin`; -1 if nowhere in its line. */
  endOfEmphasis(mark, begin) {
    const line = this.next("\n", begin);
    if (mark === "~~") {
      const end = this.next("~", begin);
      return end < line && this.text.startsWith(mark, end) ? end : -1;
    }
    if (mark.length === 1) {
      const end = Math.min(this.next("*", begin), this.next("_", begin));
      return end < line && this.text[end] === mark && !/\w/.test(this.text[end + 1] ?? "") ? end : -1;
    }
    if (begin <= (this.endless.get(mark) ?? -1)) return -1;
    let end = this.next(mark, begin + 1);
    while (end < line && /\s/.test(this.text[end - 1])) end = this.next(mark, end + 1);
    if (end < line) return end;
    this.endless.set(mark, line);
    return -1;
  }

  escapedAt(at) {
    const next = this.text[at + 1];
    return this.text[at] === "\\" && next && ESCAPED.includes(next) ? { end: at + 2, node: next } : undefined;
  }
}

/** The places of runs of backticks by their lengths, the last first. */
function backticks(text) {
  const runs = new Map();
  for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  return runs;
}

/** A link to the web, which says where it leads; anything else (javascript:, data:, a path here) stays text. */
function link(label, address) {
  if (!/^https?:\/\//i.test(address)) return document.createTextNode(`${label} (${address})`);
  const rel = "noopener noreferrer nofollow";
  return element("a", { href: address, rel, target: "_blank", title: address, textContent: label || address });
}
