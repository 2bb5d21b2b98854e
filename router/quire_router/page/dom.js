// What every view needs to build its part of the page: elements, icons, figures in words, the clipboard.

const SVG = "http://www.w3.org/2000/svg";

/** Drawn in a square of 24 units, with lines of the text's colour. */
const ICONS = {
  add: "M12 5v14M5 12h14",
  branch: "M7 4v10a3 3 0 0 0 3 3h7M17 17l-3-3M17 17l-3 3M7 8c0 0 0-1 3-1h7M17 7l-3-3M17 7l-3 3",
  check: "M5 13l4 4L19 7",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  delete: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  edit: "M4 20l1-5L16 4l4 4L9 19zM13.5 6.5l4 4",
  export: "M12 15V4M8 8l4-4 4 4M5 14v5h14v-5",
  import: "M12 4v11M8 11l4 4 4-4M5 14v5h14v-5",
  next: "M9 5l7 7-7 7",
  previous: "M15 5l-7 7 7 7",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 3v4.5h-4.5",
};

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

/** Element `name` of a drawing, with these attributes. */
export function drawing(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export const icon = (name) => drawing("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, drawing("path", { d: ICONS[name] }));

/** A button that is an icon, and says `label` to a pointer that rests there and to a screen reader. */
export function iconButton(name, label, action) {
  const button = element("button", { type: "button", class: "icon-button", title: label, "aria-label": label }, icon(name));
  button.addEventListener("click", action);
  return button;
}

/** A button that copies what `text()` returns, and says for two seconds whether it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const done = await copy(text());
    button.replaceChildren(done ? icon("check") : "Cannot copy here");
    button.setAttribute("aria-label", done ? "Copied" : "Cannot copy here");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have a clipboard on https and localhost only. Elsewhere a selection can still be copied.
    const field = element("textarea", { value: text, class: "hidden" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

export const number = (value) => value.toLocaleString("en");
export const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** A duration: "12 ms", "3.4 s", "14 s", "5 min", "3 h", "2 d". */
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

const two = (value) => String(value).padStart(2, "0");

/** The clock at a Unix time, as "22:25:05". */
export function clock(time) {
  const date = new Date(time * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
}

/** As `clock`, as an element that knows the date too. */
export function timeNode(time) {
  const date = new Date(time * 1000);
  return element("time", { dateTime: date.toISOString(), title: date.toLocaleString(), textContent: clock(time) });
}
