// What went wrong, in plain words. Pure.

/**
 * Returns a title and a sentence for an error of the server, and what helps: `key`, `retry` or nothing.
 * `waitS` is how long to wait first.
 */
export function explain(error) {
  const { status, code, message, retryAfterS } = error;
  const said = message || "The server gave no reason.";
  if (status === 0 && code === "cut_off") return retry("The answer was cut off", "The connection ended before the answer did.");
  if (status === 0) return retry("The server cannot be reached", "Is it still running, and is this device still on its network?");
  if (status === 401) return { title: "This server asks for an API key", detail: keyHint(said), helps: "key", waitS: 0 };
  if (status === 429) return retry("Too much at once", said, retryAfterS);
  if (status === 503) return retry("The server is not ready", said, retryAfterS);
  if (status === 504) return retry("The answer took too long", said);
  if (status === 403) return plain("The privacy profile does not allow this", said);
  if (code === "context_length_exceeded") return plain("The conversation is too long for the model", said);
  if (status === 413) return plain("The conversation is too large to send", said);
  if (status >= 500) return retry("The server made a mistake", said);
  return plain("The server cannot take this request", said);
}

/** The server's words are for programs where no key was sent; a wrong key has its own. */
function keyHint(said) {
  return said.includes("Bearer") ? "Enter the key that this server's operator gave you. It stays in this page's memory." : said;
}

function retry(title, detail, waitS = 0) {
  return { title, detail, helps: "retry", waitS: waitS ?? 0 };
}

function plain(title, detail) {
  return { title, detail, helps: null, waitS: 0 };
}
