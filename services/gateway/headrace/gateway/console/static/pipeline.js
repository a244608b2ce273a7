// The pipeline as it is drawn: stages with their workers, and on each arrow the queue that it is.

import { bar, byId, duration, h, number, percentile, rate } from "./dom.js";
import { trends } from "./trends.js";

const CARRIES = { render: "requests", decode: "jobs", prefill: "prompts", derender: "token IDs" };
const TITLES = { render: "Render", decode: "Decode", derender: "Derender", prefill: "Prefill" };
const DOES = { render: "text → token IDs", decode: "generates", derender: "token IDs → text", prefill: "computes prompts" };
const MAX_WORKERS = 8;

export function showPipeline(state, model) {
  const workers = state.workers.filter((worker) => worker.model === model);
  const of = (role) => workers.filter((worker) => worker.role === role);
  const queue = (role) => (state.queues ?? []).filter((row) => row.stage === role && row.model === model);
  const areas = [
    gateway(state),
    link("render", queue("render"), state), stage("render", of("render")),
    link("decode", queue("decode"), state), stage("decode", of("decode")),
    branch(queue("prefill"), state), stage("prefill", of("prefill")),
    link("derender", [], state), stage("derender", of("derender")),
    trends(state, workers, model), legend(state, workers),
  ];
  byId("pipeline").replaceChildren(...areas);
  const ready = workers.filter((worker) => worker.state === "ready").length;
  byId("pipeline-note").textContent = `${ready} of ${workers.length} workers ready`;
}

function place(element, area) {
  element.style.gridArea = area;
  return element;
}

function gateway(state) {
  const title = h("h3", {}, "Gateway", h("span", {}, "HTTP"));
  const waiting = h("div", { class: "worker" }, h("b", {}, number(state.num_running)), " clients wait");
  const note = state.is_draining ? h("div", { class: "where" }, "draining") : null;
  return place(h("div", { class: "stage tone-gateway" }, title, waiting, note), "gateway");
}

function stage(role, workers) {
  const title = h("h3", {}, TITLES[role], h("span", {}, DOES[role]));
  const classes = `stage tone-${role}${role === "prefill" ? " branch" : ""}${workers.length ? "" : " absent"}`;
  const none = role === "prefill" ? "none: decode computes prompts itself" : "no worker";
  const shown = workers.slice(0, MAX_WORKERS).map(worker);
  const more = workers.length - shown.length;
  return place(h("div", { class: classes }, title,
    workers.length ? shown : h("div", { class: "worker muted" }, none),
    more > 0 && h("div", { class: "worker muted" }, `and ${more} more`)), role);
}

function worker(beat) {
  const parts = [h("div", { class: "name" },
    h("span", { class: `dot ${beat.state}`, title: beat.state }),
    h("b", { title: beat.instance }, beat.instance),
    h("span", { class: "muted" }, beat.state !== "ready" ? beat.state : beat.is_colocated ? "colocated" : ""))];
  if (beat.slots) parts.push(meter("slots", beat.num_running / beat.slots, `${beat.num_running}/${beat.slots}`));
  if (beat.kv_blocks_total) {
    const used = 1 - beat.kv_blocks_free / beat.kv_blocks_total;
    parts.push(meter("KV", used, `${(100 * used).toFixed(0)} %`));
  }
  if (beat.process) parts.push(h("div", { class: "where" }, beat.process));
  return h("div", { class: "worker" }, parts);
}

function meter(what, share, text) {
  return h("div", { class: "meter" }, h("span", {}, what), bar(share), h("span", {}, text));
}

function lanes(rows, state) {
  if (!rows.length) return state.queues === null ? "queue not visible" : "";
  return h("div", { class: "lanes" }, rows.map((row) => h("div", {
    class: row.num_waiting ? "waits" : "",
    title: `${row.num_waiting} wait, ${row.num_taken} taken`,
  }, h("span", {}, row.lane), h("span", {}, number(row.num_waiting)),
    row.oldest_s != null && h("span", { class: row.oldest_s >= 10 ? "old" : "" }, duration(row.oldest_s)))));
}

function link(role, rows, state) {
  const busy = rows.some((row) => row.num_waiting) ? " busy" : "";
  return place(h("div", { class: `link${busy}` }, h("span", {}, CARRIES[role]), h("div", { class: "arrow" }),
    role === "derender" ? "" : lanes(rows, state)), `q-${role}`);
}

function branch(rows, state) {
  const busy = rows.some((row) => row.num_waiting) ? " busy" : "";
  return place(h("div", { class: `link down${busy}` },
    h("span", {}, "prompts ", h("span", { class: "both" }, "↓")), lanes(rows, state),
    h("span", {}, h("span", { class: "both" }, "↑"), " KV cache")), "q-prefill");
}

function legend(state, workers) {
  const pulled = workers.reduce((sum, beat) => sum + (beat.num_external_cached_token_ids ?? 0), 0);
  const timings = state.requests.filter((record) => workers.some((beat) => beat.model === record.model))
    .map((record) => record.timings).filter((t) => t.prefill_mode);
  const remote = timings.filter((t) => t.kv_transfer_s);
  const rates = remote.map((t) => t.kv_transfer_bytes / t.kv_transfer_s);
  const fact = (what, value) => [h("dt", {}, what), h("dd", {}, value)];
  const text = state.queues === null
    ? "On the arrows: how many wait in each lane." : "On the arrows: how many wait in each lane, and for how long the oldest does.";
  return place(h("div", { class: "legend" }, h("dl", {},
    h("h3", {}, h("span", { class: "swatch tone-kv" }), "KV transfer"),
    fact("prompt tokens moved", number(pulled)),
    fact("recent requests with a remote prefill", timings.length ? `${remote.length} of ${timings.length}` : "–"),
    fact("median", duration(percentile(remote.map((t) => t.kv_transfer_s), 0.5))),
    fact("median rate", rate(percentile(rates, 0.5)))),
  h("div", {}, text)), "legend");
}
