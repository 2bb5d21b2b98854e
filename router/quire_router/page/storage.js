// What is kept in this browser, in the `localStorage` of the router's origin, which holds a few megabytes.

/** Stores a text. Returns false, and leaves what was stored before, where there is no room. */
export function keep(name, text) {
  try {
    localStorage.setItem(name, text);
    return true;
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    return false;
  }
}

/** Returns what is stored as JSON; null if there is nothing, or it is damaged. */
export function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

/** As `crypto.randomUUID`, which browsers have on https and localhost only. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
