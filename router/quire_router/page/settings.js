// The form of parameters: kept in this browser, and read as the fields of a request.

import { number } from "./dom.js";
import { keep, stored } from "./storage.js";

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
  /** `select` is the list of models, which stands elsewhere on the page. */
  constructor(root, select) {
    Object.assign(this, { root, select, limits: new Map() });
    this.shape = root.querySelector("#shape-label");
    this.stored = stored(STORED) ?? {};
    for (const field of this.fields()) {
      if (field.name in this.stored) field[field.type === "checkbox" ? "checked" : "value"] = this.stored[field.name];
      for (const kind of ["input", "change"]) field.addEventListener(kind, () => this.changed());
    }
    root.querySelector("#reset").addEventListener("click", () => this.reset());
    this.showShape();
  }

  fields() {
    return [this.select, ...this.root.querySelectorAll("[name]")];
  }

  field(name) {
    return this.fields().find((field) => field.name === name);
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

  /** Empties all fields but the model. */
  reset() {
    for (const field of this.root.querySelectorAll("[name]")) {
      if (field.type === "checkbox") field.checked = false;
      else field.value = field.options?.[0].value ?? "";
    }
    this.changed();
  }

  /** Offers the models that this key may use, as the API lists them. */
  offer(models) {
    this.select.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    this.limits.clear(); // as messages have it
    for (const model of models) this.limits.set(model.id, model.max_model_len);
    if (this.limits.has(this.stored.model)) this.select.value = this.stored.model;
  }

  get model() {
    return this.select.value;
  }

  /** What is known of the model, in words. */
  get facts() {
    const limit = this.limits.get(this.model);
    return limit ? `Context of ${number(limit)} tokens` : "";
  }

  /** The system message as a list of none or one. */
  system() {
    return this.value("system") ? [{ role: "system", content: this.value("system") }] : [];
  }

  /** The fields of a request, but its messages. Raises `SettingError`. */
  request() {
    const options = { include_usage: true, continuous_usage_stats: true };
    const body = { ...this.other(), model: this.value("model"), stream: true, stream_options: options };
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

  /** Fields that the form does not have. */
  other() {
    if (!this.value("other")) return {};
    const fields = this.json("other");
    if (fields === null || typeof fields !== "object" || Array.isArray(fields)) throw new SettingError(this.field("other"), "Other parameters are a JSON object.");
    return fields;
  }

  json(name) {
    try {
      return JSON.parse(this.value(name));
    } catch (error) {
      throw new SettingError(this.field(name), `This is not JSON: ${error.message}`);
    }
  }
}
