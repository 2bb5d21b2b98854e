// Colours for code, in time proportional to its length: one pass that knows comments, strings, numbers and keywords of
// the common families of languages. What it does not know stays plain.

import { element } from "./dom.js";

const C_LIKE = "break case catch class const continue default do else enum extends final finally for if import in instanceof new null private protected public return static struct super switch this throw try typedef union void while true false";
const KEYWORDS = {
  python: "and as assert async await break class continue def del elif else except finally for from global if import in is lambda None nonlocal not or pass raise return True False try while with yield match case self",
  javascript: `${C_LIKE} async await delete export function interface let of type typeof undefined var yield`,
  java: `${C_LIKE} abstract boolean byte char double float implements int interface long package short synchronized throws var record`,
  c: `${C_LIKE} auto bool char constexpr delete double extern float inline int long namespace nullptr signed sizeof short template typename unsigned using virtual #include #define #ifdef #ifndef #endif`,
  go: "break case chan const continue default defer else fallthrough for func go goto if import interface map nil package range return select struct switch type var true false string int error bool",
  rust: "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait type unsafe use where while true false",
  bash: "case do done elif else esac export fi for function if in local return set then until while echo cd",
  sql: "SELECT FROM WHERE AND OR NOT NULL INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE DROP ALTER JOIN LEFT RIGHT INNER OUTER ON GROUP BY ORDER LIMIT AS DISTINCT HAVING UNION PRIMARY KEY",
  json: "true false null",
  yaml: "true false null",
  html: "",
};
const ALIASES = { py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript", cpp: "c", "c++": "c", h: "c", cc: "c", cs: "java", csharp: "java", kotlin: "java", kt: "java", swift: "rust", rs: "rust", golang: "go", sh: "bash", shell: "bash", zsh: "bash", console: "bash", yml: "yaml", toml: "yaml", ini: "yaml", xml: "html", svg: "html", css: "c", jsonc: "json" };
const HASHES = new Set(["python", "bash", "yaml"]);

const STRING = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|`(?:[^`\\]|\\[^])*`?/y;
const COMMENTS = { hash: /#[^\n]*/y, slash: /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/y, dash: /--[^\n]*/y, tag: /<!--[^]*?(?:-->|$)/y };
const NUMBER = /\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b/y;
const WORD = /[#@]?[A-Za-z_$][\w$]*/y;
const TAG = /<\/?[A-Za-z][\w:-]*|\/?>/y;
const REST = /[^\w"'`#@/<>$-]+|[^]/y;

/** Returns the nodes of some code: text, and spans that name what they are. */
export function highlight(text, name) {
  const language = ALIASES[name.toLowerCase()] ?? name.toLowerCase();
  if (!Object.hasOwn(KEYWORDS, language)) return [text];
  const keywords = new Set(KEYWORDS[language].split(" "));
  const comment = COMMENTS[language === "html" ? "tag" : language === "sql" ? "dash" : HASHES.has(language) ? "hash" : "slash"];
  const patterns = [["comment", comment], ["string", STRING], ["number", NUMBER], ...(language === "html" ? [["keyword", TAG]] : []), ["word", WORD], ["", REST]];
  const nodes = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const [kind, found] = match(patterns, text, at);
    at += found.length;
    const shown = kind === "word" ? kindOfWord(found, language, keywords, text[at]) : kind;
    if (!shown) {
      plain += found;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(element("span", { class: `hl-${shown}`, textContent: found }));
  }
  return plain ? [...nodes, plain] : nodes;
}

function match(patterns, text, at) {
  for (const [kind, pattern] of patterns) {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) return [kind, found[0]];
  }
  throw new Error("the last pattern matches any character");
}

function kindOfWord(word, language, keywords, next) {
  if (keywords.has(language === "sql" ? word.toUpperCase() : word)) return "keyword";
  if (language === "yaml" && next === ":") return "name";
  return next === "(" ? "name" : "";
}
