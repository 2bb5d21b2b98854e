// Markdown as DOM nodes. Text comes from a model, so nothing here ever makes HTML out of a string: every node is created
// by name from the short list below, and all text is set as text. Images are never loaded; they become links.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+ *(:?-+:? *)?$/;
const MAX_DEPTH = 8; // of quotes and lists in each other: a model can write thousands of ">"

/** Element `name` with these properties and children (nodes or strings). */
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") node.className = value;
    else if (key.includes("-") || key === "role" || key === "for") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

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
    else if (heading) take(1, () => inline(element(`h${Math.min(6, heading[1].length + 2)}`), heading[2]));
    else if (RULE.test(line)) take(1, () => element("hr"));
    else if (QUOTE.test(line) && depth < MAX_DEPTH) take(...quote(lines, at, depth));
    else if (ITEM.test(line) && depth < MAX_DEPTH) take(...list(lines, at, depth));
    else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) take(...table(lines, at));
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

function codeBlock(lines, at, [, mark, language]) {
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  const body = run(lines, at, (line) => !close.test(line));
  const closed = at + body < lines.length;
  const text = lines.slice(at + 1, at + body).join("\n");
  return [closed ? body + 1 : body, () => code(text, language)];
}

function code(text, language) {
  const copy = element("button", { type: "button", class: "copy", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Cannot copy here"; // browsers allow it on https and localhost only
    }
  });
  const head = element("div", { class: "code-head" }, element("span", { textContent: language || "code" }), copy);
  const pre = element("pre", { tabIndex: 0 }, element("code", { textContent: text }));
  return element("div", { class: "code" }, head, pre);
}

function quote(lines, at, depth) {
  const count = run(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, at + count).map((line) => QUOTE.exec(line)[1]);
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
    if (item && item[1].length === indent.length) items.push([item[3]]);
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

function table(lines, at) {
  const count = run(lines, at, (line) => line.includes("|"));
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, kind) => element("tr", {}, ...cells(line).map((cell) => inline(element(kind), cell)));
  const node = () => {
    const head = element("thead", {}, row(lines[at], "th"));
    const body = element("tbody", {}, ...lines.slice(at + 2, at + count).map((line) => row(line, "td")));
    return element("div", { class: "table", tabIndex: 0 }, element("table", {}, head, body));
  };
  return [count, node];
}

function paragraph(lines, at) {
  const other = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || QUOTE.test(line);
  const count = run(lines, at, (line) => line.trim() && !other(line));
  return [count, () => inline(element("p"), lines.slice(at, at + count).join("\n"))];
}

const INLINE = /(`+)([^`]|[^`][\s\S]{0,2000}?[^`])\1(?!`)|(!?)\[([^\]\n]{0,500})\]\(([^()\s]{1,2000})\)|(\*\*|__)(?=\S)([^\n]{1,2000}?\S)\6|(\*|_)(?=\S)([^*_\n]{1,2000})\8(?!\w)|~~([^~\n]{1,2000})~~|\\([\\`*_{}[\]()#+.!|~-])/;

/** Appends a line's text to `parent`, with its code, emphasis and links. */
function inline(parent, text, depth = 0) {
  let rest = text;
  for (let match; depth < MAX_DEPTH && (match = INLINE.exec(rest)); ) {
    const [all, , codeText, image, label, address, , bold, , italic, deleted, escaped] = match;
    const before = rest.slice(0, match.index);
    if (before) parent.append(before);
    if (codeText !== undefined) parent.append(element("code", { textContent: codeText }));
    else if (address !== undefined) parent.append(link(image ? `image: ${label}` : label, address));
    else if (bold !== undefined) parent.append(inline(element("strong"), bold, depth + 1));
    else if (italic !== undefined) parent.append(inline(element("em"), italic, depth + 1));
    else if (deleted !== undefined) parent.append(inline(element("del"), deleted, depth + 1));
    else parent.append(escaped);
    rest = rest.slice(match.index + all.length);
  }
  if (rest) parent.append(rest);
  return parent;
}

/** A link to the web, which says where it leads; anything else (javascript:, data:, a path here) stays text. */
function link(label, address) {
  if (!/^https?:\/\//i.test(address)) return document.createTextNode(`${label} (${address})`);
  const rel = "noopener noreferrer nofollow";
  return element("a", { href: address, rel, target: "_blank", title: address, textContent: label || address });
}
