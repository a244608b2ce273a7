// A small chat: streams an answer, and says where its time went.

import { ask, askJson, events, newRequestId } from "./api.js";
import { byId, duration, h, number, percentile } from "./dom.js";
import { waterfall } from "./waterfall.js";

const messages = [];
let running = null;  // AbortController

export function startChat(modelName, onRefused) {
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    send(modelName(), onRefused);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("chat-log").replaceChildren();
    byId("chat-note").textContent = "";
  });
}

async function send(model, onRefused) {
  const text = byId("prompt").value.trim();
  if (!text || running || !model) return;
  byId("prompt").value = "";
  messages.push({ role: "user", content: text });
  const log = byId("chat-log");
  const answer = h("div", { class: "message writing" });
  log.append(h("div", { class: "message user" }, text), answer);
  running = new AbortController();
  setBusy(true);
  const seen = { start: performance.now(), times: [], content: "", reasoning: "" };
  const requestId = newRequestId();
  try {
    await stream(model, requestId, answer, seen, running.signal);
    messages.push({ role: "assistant", content: seen.content });
  } catch (error) {
    if (error.name === "AbortError") {
      if (seen.content) messages.push({ role: "assistant", content: seen.content });
      else messages.pop();
    } else {
      messages.pop();
      log.append(h("div", { class: "message failed", role: "alert" }, error.message));
      if (error.status === 401) onRefused(error.message);
    }
  } finally {
    running = null;
    answer.classList.remove("writing");
    if (!answer.textContent) answer.remove();
    setBusy(false);
  }
  await showTimings(requestId, seen);
  log.scrollTop = log.scrollHeight;
}

async function stream(model, requestId, answer, seen, signal) {
  const body = {
    model, messages, stream: true, max_tokens: Number(byId("max-tokens").value) || 128,
    temperature: Number(byId("temperature").value),
  };
  const response = await ask("/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "X-Request-Id": requestId },
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices?.[0]?.delta ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    if (!delta.content && !reasoning) continue;
    seen.times.push(performance.now());
    if (reasoning) {
      seen.thoughts ??= answer.parentElement.insertBefore(h("div", { class: "message reasoning" }), answer);
      seen.thoughts.append(reasoning);
    }
    if (delta.content) {
      seen.content += delta.content;
      answer.append(delta.content);
    }
    const log = answer.parentElement;
    log.scrollTop = log.scrollHeight;
  }
}

async function showTimings(requestId, seen) {
  if (!seen.times.length) return;
  const gaps = seen.times.slice(1).map((time, i) => (time - seen.times[i]) / 1000);
  const fact = (what, value) => h("span", {}, `${what} `, h("b", {}, value));
  const box = h("div", { class: "timing" }, h("div", { class: "facts", "data-facts": "browser" },
    h("span", {}, "in this browser:"),
    fact("TTFT", duration((seen.times[0] - seen.start) / 1000)),
    fact("ITL median", duration(percentile(gaps, 0.5))),
    fact("ITL p95", duration(percentile(gaps, 0.95))),
    fact("chunks", number(seen.times.length))));
  byId("chat-log").append(box);
  try {
    const record = await askJson(`/requests/${requestId}`);
    box.prepend(waterfall(record, record.accepted));
    const t = record.timings;
    if (t.decode_s && t.num_output_token_ids > 1) {
      byId("chat-note").textContent = `${((t.num_output_token_ids - 1) / t.decode_s).toFixed(1)} tokens/s`;
    }
  } catch { /* another gateway has it, behind a balancer: what the browser saw stays */ }
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
}
