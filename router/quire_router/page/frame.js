// What surrounds the views: the tabs, the panels at both sides of the playground, and the theme.

import { drawing } from "./dom.js";
import { keep } from "./storage.js";

const THEME = "quire.theme";
const NARROW = matchMedia("(max-width: 68rem)");
const PANELS = ["library", "settings"];

/** Shows the view of the tab that was chosen, and has its name in the address. */
export function listenToTabs(onChange) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const select = (tab, focus) => {
    for (const each of tabs) {
      each.setAttribute("aria-selected", String(each === tab));
      each.tabIndex = each === tab ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = each !== tab;
    }
    if (focus) tab.focus();
    document.body.dataset.view = tab.id.replace("tab-", "");
    history.replaceState(null, "", tab.id === "tab-fleet" ? "#fleet" : location.pathname + location.search);
    onChange();
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select(tabs[(index + step + tabs.length) % tabs.length], true);
    });
  });
  select(location.hash === "#fleet" ? tabs[1] : tabs[0]);
}

/**
 * The panels beside the conversation. In a wide window they stand there until they are closed; in a narrow one they lie
 * over it, one at a time, until something else is touched. A window that becomes narrow closes them.
 */
export class Panels {
  constructor() {
    this.nodes = Object.fromEntries(PANELS.map((name) => [name, document.getElementById(name)]));
    this.toggles = Object.fromEntries(PANELS.map((name) => [name, document.getElementById(`toggle-${name}`)]));
    for (const name of PANELS) this.toggles[name].addEventListener("click", () => this.set(name, !this.isOpen(name)));
    NARROW.addEventListener("change", () => this.reset());
    document.querySelector(".conversation").addEventListener("pointerdown", () => this.closeOver());
    document.getElementById("library").addEventListener("click", (event) => event.target.closest(".open, #clear") && this.closeOver());
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !NARROW.matches) return;
      const open = PANELS.find((name) => this.isOpen(name));
      if (!open) return;
      event.preventDefault();
      this.set(open, false);
      this.toggles[open].focus();
    }, { capture: true });
    this.reset();
  }

  isOpen(name) {
    return !this.nodes[name].hidden;
  }

  set(name, open) {
    if (open && NARROW.matches) this.closeOver();
    this.nodes[name].hidden = !open;
    this.toggles[name].setAttribute("aria-expanded", String(open));
    document.getElementById("chat").dataset[name] = open ? "open" : "closed";
  }

  reset() {
    for (const name of PANELS) this.set(name, !NARROW.matches);
  }

  closeOver() {
    if (NARROW.matches) for (const name of PANELS) if (this.isOpen(name)) this.set(name, false);
  }
}

const THEMES = {
  auto: ["Theme: as the system", "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16"],
  light: ["Theme: light", "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M18.4 5.6l-1.1 1.1M6.7 17.3l-1.1 1.1"],
  dark: ["Theme: dark", "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z"],
};

/** The button that goes through the themes. `onChange` is called when colours have changed. */
export function listenToTheme(onChange) {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const names = Object.keys(THEMES);
  const draw = () => {
    const [label, path] = THEMES[root.dataset.theme ?? "auto"];
    button.replaceChildren(drawing("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, drawing("path", { d: path })));
    button.title = label;
    button.setAttribute("aria-label", label);
  };
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(root.dataset.theme ?? "auto") + 1) % names.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    keep(THEME, next);
    draw();
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  draw();
}
