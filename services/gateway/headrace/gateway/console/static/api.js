// The gateway: with the API key, which stays in this tab.

const KEY = "headrace-api-key";

export class RefusedError extends Error {}  // no key, or not a good one

export const key = () => sessionStorage.getItem(KEY) ?? "";
export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Fetch, and throw what the gateway says where it says no. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = `HTTP ${answer.status}`;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* a proxy's own page: the status says enough */ }
  const error = answer.status === 401 ? new RefusedError(message) : new Error(message);
  error.status = answer.status;
  throw error;
}

export const askJson = async (path) => (await ask(path)).json();

/** Yield the data of each server-sent event. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    kept += value;
    let end;
    while ((end = kept.indexOf("\n\n")) >= 0) {
      const lines = kept.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
      kept = kept.slice(end + 2);
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/** A request ID of our own, by which the request is looked up afterwards. */
export function newRequestId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return `console-${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
