// What is kept for this tab, in its `sessionStorage`, which holds a few megabytes.

/** Stores a text. Returns false, and leaves what was stored before, where there is no room. */
export function keep(name, text) {
  try {
    sessionStorage.setItem(name, text);
    return true;
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    return false;
  }
}
