// Writes the schemas of this folder: node vendor.mjs FOLDER [OUT], where FOLDER is one in which npm has installed the
// packages of KINDS (README.md has the command). These carry validators, not schemas, so that each schema is what its
// validator answers: every place is given values of each type, and values that are too short, too long, too many, and the
// errors say what is allowed there; which fields there are is what the validator reads of an object. `status` is left out.

import { mkdirSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const KINDS = {
  "prometheus-operator": { "monitoring.coreos.com/v1": ["PodMonitor", "PrometheusRule", "ServiceMonitor"] },
  "cert-manager": { "cert-manager.io/v1": ["Certificate", "Issuer"] },
  keda: { "keda.sh/v1alpha1": ["ScaledObject", "TriggerAuthentication"] },
};

const MANY = 5000; // more than the largest maxItems of these kinds
const LONG = "\u0001".repeat(100_000);
const HUGE = 1e18;
const WIDTH = 140;
const SHAPES = { object: {}, array: [], string: "x", boolean: true, number: 0.5, integer: 1 };

/** Whether a validator's error says that a value has the wrong shape altogether. */
const isShape = (error) => ["type", "anyOf", "oneOf"].includes(error.keyword);

/** The schema of one kind, asked of its validator place by place. */
class Inquiry {
  constructor(Model) {
    this.Model = Model;
  }

  /** The errors about a value at a place, others left aside. */
  errors(place, value) {
    const document = place.reduceRight((inner, name) => (name === 0 ? [inner] : { [name]: inner }), value);
    const where = place.map((name) => `/${String(name).replaceAll("~", "~0").replaceAll("/", "~1")}`).join("");
    try {
      Object.assign(new this.Model(), document).validate(); // its constructor would copy the spy away
    } catch (error) {
      if (!error.errors) throw error;
      return error.errors.filter((each) => each.instancePath === where);
    }
    return [];
  }

  /** What one keyword of the errors about a value holds, or undefined. */
  limit(place, value, keyword, parameter = "limit") {
    return this.errors(place, value).find((error) => error.keyword === keyword)?.params[parameter];
  }

  schema(place) {
    if (place.length > 40) throw new Error(`endless: ${place.join(".")}`);
    const shapes = Object.keys(SHAPES).filter((shape) => !this.errors(place, SHAPES[shape]).some(isShape));
    if (shapes.includes("number")) shapes.pop();
    if (shapes.length > 2) return {};
    if (shapes.length === 2) return { type: shapes, ...this.string(place) };
    return { type: shapes[0], ...(this[shapes[0]]?.(place) ?? {}) };
  }

  object(place) {
    const fields = new Set();
    let map = false;
    const spy = new Proxy({}, {
      get: (_, name) => void (typeof name === "string" && fields.add(name)),
      ownKeys: () => ((map = true), []),
    });
    const errors = this.errors(place, spy);
    const required = errors.filter((error) => error.keyword === "required").map((error) => error.params.missingProperty);
    const many = Object.fromEntries(Array.from({ length: MANY }, (_, number) => [`k${number}`, null]));
    const bounds = {
      minProperties: this.limit(place, {}, "minProperties"),
      maxProperties: this.limit(place, many, "maxProperties"),
    };
    if (fields.size === 0 && map) return { additionalProperties: this.schema([...place, "k"]), ...bounds };
    if (fields.size === 0) return { "x-kubernetes-preserve-unknown-fields": true, ...bounds };
    const properties = {};
    for (const name of [...fields].sort()) properties[name] = this.schema([...place, name]);
    return { required: required.length ? required.sort() : undefined, properties, ...bounds };
  }

  array(place) {
    return {
      minItems: this.limit(place, [], "minItems"),
      maxItems: this.limit(place, Array(MANY).fill(null), "maxItems"),
      uniqueItems: this.errors(place, ["x", "x"]).some((error) => error.keyword === "uniqueItems") || undefined,
      items: this.schema([...place, 0]),
    };
  }

  string(place) {
    return {
      enum: this.limit(place, LONG, "enum", "allowedValues"),
      minLength: this.limit(place, "", "minLength"),
      maxLength: this.limit(place, LONG, "maxLength"),
      // The same to Go; Python takes such a mark at the start only.
      pattern: this.limit(place, LONG, "pattern", "pattern")?.replace(/^\^\(\?i\)/, "(?i)^"),
    };
  }

  integer(place) {
    return {
      enum: this.limit(place, HUGE, "enum", "allowedValues"),
      minimum: this.limit(place, -HUGE, "minimum"),
      maximum: this.limit(place, HUGE, "maximum"),
    };
  }

  number(place) {
    return this.integer(place);
  }
}

/** JSON with each value on one line where it fits. */
function text(value, indent = "") {
  const line = JSON.stringify(value, null, 1).replace(/\n */g, " ");
  if (typeof value !== "object" || line.length + indent.length <= WIDTH) return line;
  const inner = `${indent} `;
  const entries = Array.isArray(value)
    ? value.map((item) => `${inner}${text(item, inner)}`)
    : Object.entries(value)
        .filter(([, item]) => item !== undefined)
        .map(([name, item]) => `${inner}${JSON.stringify(name)}: ${text(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${entries.join(",\n")}\n${indent}${close}`;
}

const [folder, out = import.meta.dirname] = process.argv.slice(2);
for (const [name, versions] of Object.entries(KINDS)) {
  for (const [apiVersion, kinds] of Object.entries(versions)) {
    for (const kind of kinds) {
      const path = join(resolve(folder), "node_modules/@kubernetes-models", name, apiVersion, `${kind}.js`);
      const inquiry = new Inquiry((await import(pathToFileURL(path)))[kind]);
      const target = join(out, apiVersion.replace("/", "_"));
      mkdirSync(target, { recursive: true });
      writeFileSync(join(target, `${kind}.json`), `${text(inquiry.schema(["spec"]))}\n`);
    }
  }
}
