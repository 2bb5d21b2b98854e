// The form of parameters: kept for this tab, and read as the fields of a request.

import { keep } from "./storage.js";

const STORED = "quire.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "presence_penalty", "frequency_penalty", "seed"];
const ALTERNATIVES = 5; // shown beside each token

/** A parameter that cannot be sent as it stands; `field` is its element. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export class Settings {
  constructor(root) {
    this.root = root;
    this.shape = root.querySelector("#shape-label");
    for (const kind of ["input", "change"]) root.addEventListener(kind, () => this.changed());
    this.stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    for (const field of this.fields()) {
      if (field.name in this.stored) field[field.type === "checkbox" ? "checked" : "value"] = this.stored[field.name];
    }
    this.showShape();
    if (matchMedia("(max-width: 50rem)").matches) root.open = false;
  }

  fields() {
    return this.root.querySelectorAll("[name]");
  }

  field(name) {
    return this.root.querySelector(`[name=${name}]`);
  }

  value(name) {
    return this.field(name).value.trim();
  }

  changed() {
    for (const field of this.fields()) this.stored[field.name] = field.type === "checkbox" ? field.checked : field.value;
    keep(STORED, JSON.stringify(this.stored));
    this.showShape();
  }

  showShape() {
    this.shape.hidden = ["text", "json_object"].includes(this.value("format"));
  }

  /** Offers the models that this key may use. */
  offer(models) {
    const select = this.field("model");
    select.replaceChildren(...models.map((name) => new Option(name, name)));
    if (models.includes(this.stored.model)) select.value = this.stored.model;
  }

  /** The system message as a list of none or one. */
  system() {
    return this.value("system") ? [{ role: "system", content: this.value("system") }] : [];
  }

  /** The fields of a request, but its messages. Raises `SettingError`. */
  request() {
    const body = { model: this.value("model"), stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      const field = this.field(name);
      if (!field.validity.valid) throw new SettingError(field, `${field.labels[0].firstChild.data.trim()}: ${field.validationMessage}`);
      if (field.value) body[name] = Number(field.value);
    }
    if (this.field("stop").value) body.stop = [this.field("stop").value];
    if (this.field("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    return { ...body, ...this.format(), ...this.tools() };
  }

  format() {
    const text = this.value("shape");
    switch (this.value("format")) {
      case "json_object":
        return { response_format: { type: "json_object" } };
      case "json_schema":
        return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: this.json("shape") } } };
      case "regex":
        return { structured_outputs: { regex: text } };
      case "choice":
        return { structured_outputs: { choice: text.split("\n").filter((line) => line) } };
      default:
        return {};
    }
  }

  tools() {
    if (!this.value("tools")) return {};
    const tools = this.json("tools");
    if (!Array.isArray(tools)) throw new SettingError(this.field("tools"), "Tools are a JSON list.");
    const named = tools.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
    return { tools: named, tool_choice: this.value("tool_choice") };
  }

  json(name) {
    try {
      return JSON.parse(this.value(name));
    } catch (error) {
      throw new SettingError(this.field(name), `This is not JSON: ${error.message}`);
    }
  }
}
