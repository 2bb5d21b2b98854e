// Streams of the router's API: server-sent events over fetch, and an answer that goes on after a cut connection.

const PAUSE = 1000; // milliseconds between two attempts, at least
const MAX_ATTEMPTS = 60; // without an event between them

/** An error that the API answered with; `status` is 0 for one that came in a stream. */
export class ApiError extends Error {
  constructor(error, status) {
    super(error?.message ?? `The router answered with status ${status}.`);
    this.code = error?.code ?? "";
    this.resumable = Boolean(error?.resumable);
    this.status = status;
  }
}

/** The address of an API path, also where a proxy serves the router under a path of its own. */
export const address = (path) => new URL(path, document.baseURI).href;

/** Calls the API. Raises `ApiError` for an error's status. */
export async function call(path, { key, headers = {}, ...options } = {}) {
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(address(path), { cache: "no-store", ...options, headers: { ...authorization, ...headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(body.error, response.status);
}

/**
 * Yields the events of a response: `{event, id, data}`. `onComment` gets the text of each comment; what is cut off is
 * not an event.
 */
export async function* events(response, onComment = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let [rest, fields] = ["", { event: "message", data: [] }];
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const [, name, value] = /^([^:]*):? ?(.*?)\r?$/.exec(line) ?? [];
        if (name === "data") fields.data.push(value);
        else if (line.startsWith(":")) onComment(value);
        else if (name === "event" || name === "id") fields[name] = value;
        else if (!line.trim() && fields.data.length) {
          yield { ...fields, data: fields.data.join("\n") };
          fields = { event: "message", data: [] };
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Yields the chunks of an answer, across any number of broken connections (docs/resuming.md).
 *
 * `pending` says how far it came, is updated before each chunk is yielded, and can be stored: `{key, body, id, after}`,
 * where `key` is the Idempotency-Key, `body` the request, `id` the request's id once it is known, and `after` the id of
 * the last event. `onPause` is called with a sentence while there is no connection, and with "" when there is one again;
 * `onHeaders` with those of each response, and `onComment` with what the router says beside the answer.
 */
export async function* answer(pending, { key, signal, onPause, onHeaders, onComment }) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      const response = await open(pending, key, signal);
      onPause("");
      onHeaders(response.headers);
      pending.id ||= response.headers.get("x-request-id") ?? "";
      for await (const event of events(response, onComment)) {
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(chunk.error, 0);
        attempt = 0;
        pending.id = chunk.id;
        if (event.id) pending.after = event.id;
        yield chunk;
      }
      throw new TypeError("the stream was cut"); // as fetch raises it for a connection that broke
    } catch (error) {
      const again = error instanceof ApiError ? error.resumable || error.status === 503 : error instanceof TypeError;
      if (!again || signal.aborted || attempt >= MAX_ATTEMPTS) throw error;
      const why = error instanceof ApiError ? error.message : "The connection broke.";
      onPause(`${why} Attempt ${attempt + 1} of ${MAX_ATTEMPTS}.`);
    }
    await pause(PAUSE);
    signal.throwIfAborted();
  }
}

/** Waits, up to half as long again: pages that lost one router do not come back at one moment. */
export function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds * (1 + Math.random() / 2)));
}

function open(pending, key, signal) {
  if (pending.after) {
    const headers = { "Last-Event-ID": pending.after };
    return call(`v1/requests/${encodeURIComponent(pending.id)}/events`, { key, headers, signal });
  }
  // Nothing has come yet. The key makes this the same request, however often it is sent.
  const headers = { "Content-Type": "application/json", "Idempotency-Key": pending.key };
  return call("v1/chat/completions", { key, headers, signal, method: "POST", body: JSON.stringify(pending.body) });
}
